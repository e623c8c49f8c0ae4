"""Loads the model that a grid is tuned for onto the device, with nothing compiled yet."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.data.inputs import Text
from jaxembed.data.spec import ModelSpec
from jaxembed.engine.build import Plan, make_plan, seats_of
from jaxembed.engine.replica import Replica
from jaxembed.errors import ConfigError, WrongTask
from jaxembed.models import program
from jaxembed.preprocessing.text import Rules, TextProcessor
from jaxembed.runtime.tasks import KIND
from jaxembed.tools.tune.cost import Workbench

TOKENIZERS = 4  # threads


@dataclass(frozen=True)
class MeasuredModel:
    """A model as a server with the same settings would run it, but with one replica only.

    All replicas of a server have the same grid, so one is enough to tune it.
    """

    name: str
    spec: ModelSpec
    plan: Plan  # its grid is the one before the tuning
    config: EngineConfig
    workbench: Workbench
    processor: TextProcessor

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text with its prompt, cut to the input limit.

        Raises EmptyInput, TokenizerError, or WrongTask if the model takes pairs of texts.
        """
        if self.spec.task == "rerank":
            raise WrongTask(
                f"{self.name} is {KIND['rerank']}: texts do not say how long its pairs are; give "
                "lengths in a .json file or the URL of a server"
            )
        rules = Rules(self.processor.prompt(None, None), truncate=True, side="right")
        encodings = self.processor.encode([Text(text) for text in texts], rules).work.encodings
        return [encoding.length for encoding in encodings]

    def close(self) -> None:
        """Stop the tokenizer threads."""
        self.processor.executor.shutdown()


def load_measured(source: ModelSource, *, config: EngineConfig, text: TextConfig) -> MeasuredModel:
    """Load a model onto the device.

    Raises CheckpointError if the model cannot be read, and ConfigError if the settings do not fit.
    """
    if config.null_model:
        raise ConfigError("--null-model runs on no device, so there is nothing to tune")
    if config.parallel == "replicas":
        config = dataclasses.replace(config, devices=1)
    path = hub.resolve(source)
    spec = checkpoint.load_spec(path)
    if spec.is_static:
        raise ConfigError(
            f"{spec.source} holds static embeddings, which run without buckets, so there is "
            "nothing to tune"
        )
    forward = program(spec)
    plan = make_plan(spec, forward, config, source.cache_dir)
    processor = TextProcessor(
        checkpoint.tokenizer_path(path), spec, plan.max_input_tokens, text, TOKENIZERS
    )
    seat = seats_of(plan, forward, checkpoint.stream_params(path, spec, forward.order))[0]
    assert isinstance(seat.runner, Replica)
    return MeasuredModel(source.name, spec, plan, config, Workbench(seat.runner), processor)
