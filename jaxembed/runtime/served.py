"""A model that a server serves: its routes, tasks and tokenizers, without the engine.

A front-end process has such models too, so this module does not import JAX.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Generic, TypeVar

from jaxembed.checkpoints import checkpoint
from jaxembed.checkpoints.ranges import StoredRanges, VectorKind
from jaxembed.config import TextConfig
from jaxembed.data.spec import ModelSpec, Routes
from jaxembed.engine.admission import Admission, Cost, Reservation
from jaxembed.observability.metrics import Telemetry
from jaxembed.preprocessing.images.processor import ImageProcessor, Processor
from jaxembed.preprocessing.text import DECODED_BYTES, PIECE_BYTES, TextProcessor
from jaxembed.preprocessing.tokenizer import TokenPiece
from jaxembed.runtime.runner import Dispatcher, RequestRunner
from jaxembed.runtime.tasks import Tasks


@dataclass(frozen=True)
class ServedRoute:
    """A route of a model: the processor of its inputs, and the runner of its requests."""

    spec: ModelSpec
    processor: Processor
    runner: RequestRunner
    device_name: str
    dtype: str

    @cached_property
    def compute_type(self) -> str:
        """Device and dtype in the form of TEI's header, such as `cpu+bfloat16`."""
        return f"{self.device_name.lower().replace(' ', '-')}+{self.dtype}"

    @property
    def takes_texts(self) -> bool:
        """Whether the inputs of the route are texts; otherwise they are images."""
        return isinstance(self.processor, TextProcessor)

    @property
    def text_processor(self) -> TextProcessor:
        """The processor of a route that takes texts."""
        assert isinstance(self.processor, TextProcessor)
        return self.processor


AnyRoute = TypeVar("AnyRoute", bound=ServedRoute, covariant=True)


class ServedModel(Dispatcher, Generic[AnyRoute]):
    """A model with its tasks and routes.

    `name` is the id of the model, and `specs` are those of its checkpoint. At most one of the
    routes takes images.
    """

    def __init__(
        self,
        name: str,
        specs: Routes,
        routes: Mapping[str, AnyRoute],
        text: TextConfig,
        telemetry: Telemetry,
        ranges: Mapping[VectorKind, StoredRanges],
        admission: Admission,
    ):
        super().__init__({key: route.runner for key, route in routes.items()}, admission)
        self.name, self.specs, self.text, self.telemetry = name, specs, text, telemetry
        self.routes: Mapping[str, AnyRoute] = routes
        self.text_routes = {key: route for key, route in routes.items() if route.takes_texts}
        self.takes_images = len(self.text_routes) < len(routes)
        self.main = routes[specs.of_texts.main_route]
        self.spec = self.main.spec
        self.runner = self.main.runner  # the server uses it to call functions off the event loop
        self.tasks = Tasks(name, specs, self.main.text_processor, text, ranges)

    async def tokenize_async(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        prompt_name: str | None,
        reservation: Reservation | None = None,
    ) -> list[list[TokenPiece]]:
        """Return the tokens of each text, with the prompt in front of the text, and byte offsets.

        Texts are not truncated. For admission each character counts as a token. `reservation`
        counts the memory of the HTTP request; None: a new reservation. Raises UnknownPrompt,
        UnknownRoute, EmptyInput, TokenizerError, BackendError if the model is closed, and the
        errors of `Admission.admit`.
        """
        route = self.routes[self.tasks.route_of_prompt(prompt_name)]
        processor = route.text_processor
        prompt = processor.prompt(None, prompt_name)
        characters = sum(map(len, texts)) + len(texts) * len(prompt)
        call = partial(processor.pieces, texts, special=add_special_tokens, prompt=prompt)
        cost = Cost(len(texts), characters, characters * PIECE_BYTES)
        with await self.admit(cost, reservation, is_run=False):
            return await route.runner.off_loop(call)

    async def decode_async(
        self,
        ids: Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool,
        prompt_name: str | None = None,
        reservation: Reservation | None = None,
    ) -> list[str]:
        """Decode each list of token ids with the tokenizer of the prompt's route.

        `reservation` counts the memory of the HTTP request; None: a new reservation. Raises
        UnknownRoute, EmptyInput, InvalidInput for an id outside the vocabulary, BackendError if the
        model is closed, and the errors of `Admission.admit`.
        """
        route = self.routes[self.tasks.route_of_prompt(prompt_name)]
        call = partial(route.text_processor.decode, ids, skip_special_tokens=skip_special_tokens)
        tokens = sum(map(len, ids))
        cost = Cost(len(ids), tokens, tokens * DECODED_BYTES)
        with await self.admit(cost, reservation, is_run=False):
            return await route.runner.off_loop(call)

    def text_processor_of(self, name: str) -> TextProcessor:
        """Return the text processor of the route `name`, or that of the main route if `name` takes
        images."""
        return self.text_routes.get(name, self.main).text_processor


def tokenizer_threads(text: TextConfig) -> int:
    """Return the number of tokenizer threads: --tokenization-workers or, by TEI's rule, one less
    than the cores, at most 64. The default is at least 4, so that one huge text does not delay all
    other texts."""
    return text.workers or min(max((os.cpu_count() or 2) - 1, 4), 64)


def processor_of(
    folder: Path,
    spec: ModelSpec,
    limit: int,
    text: TextConfig,
    *,
    takes_texts: bool,
    texts: Processor | None = None,
) -> Processor:
    """Return the processor of a route of texts or images, whose checkpoint is in `folder`. Inputs
    have at most `limit` tokens. `texts` is the processor of the texts beside the images of a route,
    if there are any. Raises CheckpointError."""
    workers = tokenizer_threads(text)
    if not takes_texts:
        assert not isinstance(texts, ImageProcessor)
        return ImageProcessor(spec, workers, texts)
    return TextProcessor(checkpoint.tokenizer_path(folder), spec, limit, text, workers)
