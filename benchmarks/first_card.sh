#!/usr/bin/env bash
# Measures jaxembed on an accelerator that is there for ten minutes, from a machine without internet.
#
#   make card                        before, where there is internet: packs .card, which must come along
#   benchmarks/first_card.sh         there: call 1 of 4, then 2, 3, 4; writes to $OUT (default: first_card)
#   python -m benchmarks.first_card collect FOLDER   after: takes the JSON into benchmarks/results and docs/accelerators.md
#
# It ends within 570 seconds. What it has learned is in $OUT at any moment, also if it is killed.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" -m benchmarks.first_card run "$@"
