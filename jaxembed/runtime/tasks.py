"""Checks what requests ask of a model, and makes the requests for its tasks."""

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from math import inf
from typing import Literal, get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from jaxembed.checkpoints.ranges import StoredRanges, VectorKind
from jaxembed.config import TextConfig
from jaxembed.data.inputs import (
    ChunkedText,
    ChunkSize,
    Content,
    Image,
    Input,
    Pair,
    Parts,
    Text,
    Tokens,
    parts_of,
)
from jaxembed.data.outputs import OUTPUTS, REPRESENTATIONS, OutputName
from jaxembed.data.spec import IMAGE_ROUTE, ModelSpec, Routes, Task
from jaxembed.errors import EmptyInput, InvalidInput, UnknownRoute, WrongParts, WrongTask
from jaxembed.preprocessing.prompts import (
    PURPOSES,
    Role,
    prompt_for,
    prompt_of_role,
    role_of,
    same_purpose,
    with_instruction,
)
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from jaxembed.preprocessing.tokenizer import MAX_READ_CHARACTERS
from jaxembed.preprocessing.windows import MAX_WINDOWS, MIN_CHUNK
from jaxembed.quantise import NEEDS_RANGES, EmbeddingDtype, embedding_dtype
from jaxembed.runtime.options import (
    Embeddings,
    EncodeOptions,
    RequestedOptions,
    ScoreOptions,
    Scores,
)
from jaxembed.runtime.requests import (
    LOGITS,
    TOKEN_LOGITS,
    AnyRequest,
    ComparedRequest,
    ComputeRequest,
    DividedRequest,
    EncodeRequest,
    LateRequest,
    ListRequest,
    QueryRequest,
    ScoreRequest,
    TokenScoreRequest,
)
from jaxembed.runtime.similarity import Weights, weights_of

SUPPORTED_TASKS: dict[Task, tuple[Task, ...]] = {  # the tasks that a model of each task can do
    "embed": ("embed",),
    "classify": ("classify",),
    "rerank": ("rerank", "classify"),
    "token_classify": ("token_classify",),
}
KIND: dict[Task, str] = {
    "embed": "an embedding model",
    "classify": "a classifier",
    "rerank": "a reranker",
    "token_classify": "a token classifier",
}
# Options that only models that score pairs have -> the request field that sets each option.
PAIR_FIELDS = {"instruction": "instruction", "max_document_tokens": "max_tokens_per_doc"}
# names of the outputs that have a row for each token
PER_TOKEN = {name for name, kind in OUTPUTS.items() if kind.per == "token"}
MAX_PURPOSE = 100  # characters; the intent of a request with a longer purpose is not cached
VECTORS: tuple[OutputName, ...] = ("dense", "multi_vector")  # outputs with dimensions to truncate
IMAGES = {Image, Parts}  # the types of inputs with images
IMAGE_URI = "data:image/"  # the data URI of an image begins with it
NO_RANGES: Mapping[VectorKind, StoredRanges] = {}


class Intent(msgspec.Struct, frozen=True, eq=False):
    """What a request for embeddings asks for, resolved for one model."""

    options: EncodeOptions  # the request's options; outputs, prompt and route are resolved
    tokenization: TokenizationOptions
    outputs: frozenset[OutputName]  # the outputs that the engine computes
    route: str
    adapter: int  # number of the adapter; 0: no adapter
    adapter_name: str | None  # and its name
    ranges: np.ndarray | None  # float32 [2, dim]: calibration ranges, if the dtype needs them
    prompt_name: str | None  # name of the chosen prompt; "": no named prompt; None: the default
    words: str | None  # the request field with words that are put before each text
    dtype: EmbeddingDtype | None  # the dtype that the request names; None: it names none
    # further dtypes that the request asks for, each with its calibration ranges or None
    types: dict[EmbeddingDtype, np.ndarray | None]


class Tasks:
    """Makes the requests to one model.

    All methods raise WrongTask for what the model cannot do, and InvalidInput for wrong options.
    """

    def __init__(
        self,
        name: str,
        routes: Routes,
        processor: TextProcessor,
        text: TextConfig,
        ranges: Mapping[VectorKind, StoredRanges] = NO_RANGES,
    ):
        """`processor` is the text processor of any route, because all routes have the same prompts.
        `text` has the server's defaults, and `ranges` the ranges for each kind of vectors."""
        self._name = name
        self._routes = routes.of_texts
        self._takes_images = routes.image is not None
        self._spec = self._routes.main
        self._offered, self._widths = self._spec.representations, self._spec.widths
        self._processor = processor
        self._text = text
        self._ranges = ranges
        # Many requests have equal options. `intent` does not cache long purposes and prompt texts.
        self._cached_intent = lru_cache(maxsize=64)(self._resolve)

    def embed(self, inputs: Sequence[Input], options: EncodeOptions) -> AnyRequest[Embeddings]:
        """Make the request for the embeddings of each input, in the outputs that the options name.
        Raises WrongTask, and InvalidInput, also for images together with a prompt if the model has
        no template for them."""
        with_images = not IMAGES.isdisjoint(map(type, inputs))
        return self.request(inputs, self.intent(RequestedOptions(options), with_images=with_images))

    def intent(self, requested: RequestedOptions, *, with_images: bool = False) -> Intent:
        """Resolve what a request asks for: its prompt, route, adapter, outputs and dtype. Callers
        pass the result to `request` with the inputs. Raises WrongTask, InvalidInput, and TypeError
        for dimensions that are not an integer."""
        for name in ("dimensions", "max_active_dims"):
            count = getattr(requested.options, name)
            try:
                operator.index(0 if count is None else count)
            except TypeError:  # for 8.0, which the cache would mistake for 8
                raise TypeError(f"`{name}` of {count!r} is not an integer") from None
        is_long = any(len(purpose) > MAX_PURPOSE for _, purpose in requested.purposes)
        is_long = is_long or bool(requested.options.prompt or requested.options.instruction)
        resolve = self._resolve if is_long else self._cached_intent
        return resolve(requested, with_images)

    def request(self, inputs: Sequence[Input], intent: Intent) -> AnyRequest[Embeddings]:
        """Make the request for the embeddings of inputs, with the result of `intent`. Raises
        InvalidInput for a text that is the data URI of an image, for a text as a document of a
        model whose documents are images, for token ids if the request has an instruction, and for
        an input of several parts that the model does not take."""
        options = intent.options
        if intent.words is not None and Tokens in map(type, inputs):
            raise InvalidInput(
                f"`{intent.words}` is for texts, and the request has token ids; put the ids of the "
                "words before them",
                field=intent.words,
            )
        plain = EncodeRequest(
            inputs,
            intent.tokenization,
            intent.outputs,
            options.priority,
            options,
            route=intent.route,
            adapter=intent.adapter,
            ranges=intent.ranges,
        )
        if not self._takes_images:
            return plain
        _check_texts(inputs)
        self._check_parts(inputs)
        is_image = [type(item) in IMAGES for item in inputs]
        if not all(is_image) and intent.tokenization.role == "document" and self._spec.reads_pages:
            raise InvalidInput(
                f"{self._name} takes images as documents, and texts only as queries; send images",
                index=is_image.index(False),
            )
        of_images = dataclasses.replace(plain, route=IMAGE_ROUTE)
        return DividedRequest.by_kind(plain, of_images, is_image)

    def _check_parts(self, inputs: Sequence[Input | Content]) -> None:
        """Raise WrongParts, with the index of the input, if the model takes no input of several
        parts."""
        for index, item in enumerate(inputs):
            if isinstance(item, Parts) and not self._spec.takes_parts:
                raise WrongParts(
                    f"{self._name} takes one text or one image as an input, not several parts; "
                    "send each as an input of its own",
                    index=index,
                )

    def _resolve(self, requested: RequestedOptions, with_images: bool) -> Intent:
        """Resolve what a request asks for, as `intent` does, but without a cache. `with_images`
        says whether some inputs are images. Raises WrongTask and InvalidInput."""
        check_task(self._name, self._spec, "embed")
        options, words, has_special_names = self._with_words(requested)
        if requested.purposes:
            options = self._with_purposes(options, requested.purposes)
        if requested.outputs is not None:
            options = replace(options, outputs=self._named_outputs(requested))
        if requested.tokens and options.outputs == {"dense"}:
            raise InvalidInput(
                "`return_tokens` applies only to sparse and multi-vector outputs",
                field="return_tokens",
            )
        dtype = requested.dtype or embedding_dtype(options.output_dtype)
        if dtype != options.output_dtype:
            options = replace(options, output_dtype=dtype)
        self._check_outputs(options, requested.dimensions_field)
        if with_images:
            self.check_images()
            given = {"route": options.route}
            # a model of both in any role takes its prompts for the texts beside images
            if self._spec.image is None or self._spec.reads_pages:
                given |= {words: options.prompt, "prompt_name": options.prompt_name}
            elif options.prompt not in self._spec.prompts.values():
                given[words] = options.prompt
            for name, value in given.items() if self._spec.chat is None else ():
                if value:
                    raise InvalidInput(
                        f"`{name}` is for texts, and the request has images; leave it out, and "
                        "any `input_type` or `task` that sets it",
                        field=name,
                    )
        types: dict[EmbeddingDtype, np.ndarray | None] = {
            name: self.ranges(options, name, requested.types_field, of_images=with_images)
            for name in requested.types
        }
        sent = words if options.prompt and not options.special_names else None
        # "": no named prompt
        chosen = options.prompt_name if options.prompt is None else sent or ""
        adapted, adapter = self._with_prompt_of_adapter(options)
        prompt = self._processor.prompt(adapted.prompt, adapted.prompt_name)
        route = self._route(adapted)
        tokenization = TokenizationOptions(
            prompt,
            self._truncate(options),
            options.truncation_side,
            bare_ids=options.bare_ids,
            role=self._role(adapted),
            has_special_names=has_special_names,
        )
        # A sparse embedding is computed by its own head, or made from the weights of tokens.
        source = "sparse" if "sparse" in self._routes.specs[route].heads else "token_weights"
        outputs: frozenset[OutputName] = frozenset(
            source if name == "sparse" else name for name in options.outputs
        )
        ranges = self.ranges(options, options.output_dtype, of_images=with_images)
        adapter_name = self._spec.adapter_names[adapter - 1] if adapter else None
        return Intent(
            options,
            tokenization,
            outputs,
            route,
            adapter,
            adapter_name,
            ranges,
            chosen,
            sent,
            requested.dtype,
            types,
        )

    def _with_words(self, requested: RequestedOptions) -> tuple[EncodeOptions, str, bool]:
        """Return the options with the prompt that their instruction gives; the name of the field
        that holds the instruction or prompt; and whether the name of a special token in it becomes
        this token. Raises InvalidInput for an instruction or prompt that is too long or beside a
        prompt name, and for an instruction for queries beside documents."""
        options, field = requested.options, "instruction"
        if options.instruction:
            if options.prompt:
                raise InvalidInput(
                    "`instruction` and `prompt` both say what to put before the texts; send one",
                    field=field,
                )
            prompt, is_for_queries = with_instruction(
                options.instruction, self._spec.prompts, self._spec.chat
            )
            roles = {options.role, *(role_of(purpose) for _, purpose in requested.purposes)}
            if is_for_queries and "document" in roles:
                raise InvalidInput(
                    "`instruction` is for queries of this model, and the request has documents; "
                    "leave it out",
                    field=field,
                )
            options = replace(options, prompt=prompt, instruction=None, special_names=False)
        else:
            field = "prompt"
        if not options.prompt or options.special_names:
            return options, field, True
        if options.prompt_name is not None:
            raise InvalidInput(
                f"`{field}` and `prompt_name` both say what to put before the texts; send one",
                field=field,
            )
        limit = self._text.max_instruction_tokens
        has_names = self._processor.check_prompt(options.prompt, limit, field)
        return options, field, not has_names

    def _with_purposes(
        self, options: EncodeOptions, purposes: Sequence[tuple[str, str]]
    ) -> EncodeOptions:
        """Return the options with the prompt, the route and the role that the purposes choose.

        `purposes` are pairs of a request field and its value, such as ("input_type", "query").
        Raises InvalidInput for an unknown purpose, and for purposes that contradict each other or
        the prompt name.
        """
        prompts = self._spec.prompts
        # request field -> its value, and the role and the prompt name that this value chooses
        chosen: dict[str, tuple[str, Role | None, str | None]] = {}
        # the adapters that purposes choose, if the model's adapters do not depend on its prompts
        adapters: dict[str, str] = {}
        for field, purpose in purposes:
            adapter = self._adapter_of_purpose(purpose, field)
            if adapter is not None:
                adapters[field] = adapter
            if adapter == purpose:  # it says nothing about the prompt
                chosen[field] = purpose, None, None
            else:
                chosen[field] = purpose, role_of(purpose), prompt_for(purpose, prompts, field)
        # Models such as Jina v3 have an adapter for each purpose; other purposes would get none,
        # and wrong embeddings.
        tasks = [name for name in self._spec.adapter_names if name in prompts]
        for field, (purpose, _, name) in chosen.items():
            if tasks and name not in tasks:
                raise _no_task(purpose, field, tasks)
        if options.prompt_name is not None:
            name = options.prompt_name
            chosen["prompt_name"] = name, role_of(name), name
        roles, names = ({choice[k] for choice in chosen.values()} - {None} for k in (1, 2))
        if options.adapter is not None and adapters:
            adapters["model"] = options.adapter
            chosen["model"] = f":{options.adapter}", None, None
        what = "adapters" if len({*adapters.values()}) > 1 else "prompts"
        if what == "adapters" or len(roles) > 1 or len(names) > 1:
            shown = " and ".join(
                f"`{field}` of {value!r}" for field, (value, _, _) in chosen.items()
            )
            raise InvalidInput(
                f"{shown} ask for different {what}; send one of them", field=next(iter(chosen))
            )
        field, purpose = purposes[0]  # any one, because all purposes agree
        name = next(iter(names), None)
        # with words in its place, the prompt cannot select the adapter of its name
        adapter = name if options.prompt and name in tasks else None
        return replace(
            options,
            # "" is no prompt
            prompt=options.prompt or (None if names or adapters else ""),
            prompt_name=None if options.prompt else name,
            route=self.route_for(purpose, field),
            role=next(iter(roles), None),
            adapter=next(iter(adapters.values()), options.adapter or adapter),
        )

    def _adapter_of_purpose(self, purpose: str, field: str) -> str | None:
        """Return the adapter that a purpose chooses in a model with a default adapter, whose
        adapters do not depend on its prompts; None if the purpose only chooses a prompt. Raises
        InvalidInput for a purpose that is no task of the model."""
        names = self._spec.adapter_names
        if self._spec.default_adapter is None:
            return None
        if (adapter := purpose.partition(".")[0]) in names:  # `retrieval`, or `retrieval.query`
            return adapter
        if PURPOSES.get(purpose) in ("query", "document"):
            return None
        raise _no_task(purpose, field, names)

    def _named_outputs(self, requested: RequestedOptions) -> frozenset[OutputName]:
        """Return the outputs that a request names. If it names none, return multi_vector if it asks
        for several vectors, or else dense, or else (for a model without dense) all outputs. Raises
        InvalidInput for outputs that the model lacks, and for fields that contradict each other."""
        offered, field = self._offered, "return_multivector"
        if requested.outputs:
            if unknown := [name for name in requested.outputs if name not in offered]:
                raise InvalidInput(
                    f"`outputs` must be some of the model's outputs: {', '.join(offered)}. "
                    f"Given: {', '.join(unknown)}",
                    field="outputs",
                )
            named: frozenset[OutputName] = frozenset(
                name for name in REPRESENTATIONS if name in requested.outputs
            )
            if requested.multi_vector and "multi_vector" not in named:
                raise InvalidInput(
                    f"`{field}` of true contradicts `outputs` without multi_vector; send one of "
                    "them",
                    field=field,
                )
            return named
        if not requested.multi_vector:
            return frozenset({"dense"} if "dense" in offered else offered)
        if "multi_vector" not in offered:
            raise InvalidInput(
                f"`{field}` of true is not supported by this model; its outputs are "
                f"{' and '.join(offered)}",
                field=field,
            )
        return frozenset({"multi_vector"})

    def check_images(self) -> None:
        """Raise WrongTask unless the model embeds images."""
        if not self._takes_images:
            raise WrongTask(f"{self._name} takes texts and no images")

    def _check_outputs(self, options: EncodeOptions, dimensions_field: str = "dimensions") -> None:
        """Raise WrongTask for outputs that the model lacks, and InvalidInput for dimensions, a
        number of terms or a dtype that the outputs cannot have. Messages about dimensions name the
        request field `dimensions_field`."""
        unknown = {*options.outputs}.difference(self._offered)
        if missing := [name for name in REPRESENTATIONS if name in unknown]:
            raise WrongTask(
                f"{self._name} has no {' and no '.join(missing)} output, only "
                f"{' and '.join(self._offered)}"
            )
        vectors: list[OutputName] = [name for name in VECTORS if name in options.outputs]
        if options.dimensions is not None and not vectors and "sparse" in options.outputs:
            raise InvalidInput(
                f"`{dimensions_field}` is for vectors; use `max_active_dims` for sparse outputs",
                field=dimensions_field,
            )
        for name in vectors:
            check_dimensions(self._widths[name], options.dimensions, dimensions_field)
        if options.output_dtype != "float" and options.outputs == {"sparse"}:
            raise InvalidInput(
                f"`output_dtype` of {options.output_dtype} is for vectors; sparse outputs are "
                "float",
                field="output_dtype",
            )
        max_terms = options.max_active_dims
        if max_terms is not None and "sparse" not in options.outputs:
            raise InvalidInput(
                "`max_active_dims` is for sparse outputs; request one or leave it out",
                field="max_active_dims",
            )
        check_positive("max_active_dims", max_terms)

    def embed_chunks(self, texts: Sequence[ChunkedText], options: EncodeOptions) -> LateRequest:
        """Make the request for late chunking: a vector of each chunk of some texts.

        The model computes all tokens of a text together, and then the tokens of each chunk are
        pooled. Raises WrongTask, and InvalidInput, also for a model that does not pool by the mean
        alone and for a chunk size that is out of range.
        """
        return self.request_chunks(texts, self.intent(RequestedOptions(options)))

    def request_chunks(self, texts: Sequence[ChunkedText], intent: Intent) -> LateRequest:
        """Make the request for late chunking, as `embed_chunks` does, with the result of `intent`.
        Raises InvalidInput if the model or the intent does not allow late chunking."""
        spec, options = self._routes.specs[intent.route], intent.options
        if "dense" not in spec.representations:
            raise InvalidInput(
                "late chunking is for models with dense vectors, and the outputs of this model are "
                f"{' and '.join(spec.representations)}"
            )
        if options.outputs != {"dense"}:
            raise InvalidInput("late chunking supports only the dense output", field="outputs")
        if spec.dense.pooling != ("mean",):
            raise InvalidInput(
                "late chunking is for models with mean pooling, and the pooling of this model is "
                f"{' and '.join(spec.dense.pooling)}; send each chunk as a separate input"
            )
        if spec.is_static:
            raise InvalidInput(
                "late chunking is for models whose tokens attend to each other, and this model has "
                "static embeddings; send each chunk as a separate input"
            )
        if options.truncation_side != "right":
            raise InvalidInput(
                "late chunking does not truncate texts; leave out `truncation_side`",
                field="truncation_side",
            )
        for size in (text.chunks for text in texts if isinstance(text.chunks, ChunkSize)):
            if size.tokens < MIN_CHUNK:
                raise InvalidInput(
                    f"`chunk_size` must be {MIN_CHUNK} tokens or more. Given: {size.tokens}",
                    field="chunk_size",
                )
            if not 0 <= size.overlap <= size.tokens // 2:
                raise InvalidInput(
                    f"`chunk_overlap` must be from 0 to {size.tokens // 2}, half of `chunk_size`. "
                    f"Given: {size.overlap}",
                    field="chunk_overlap",
                )
        # As many windows as any text needs; or one, so that a text that needs more is refused.
        windows = MAX_READ_CHARACTERS if intent.tokenization.truncate else 1
        return LateRequest(
            texts,
            replace(intent.tokenization, max_windows=windows),
            intent.outputs,
            options.priority,
            options,
            route=intent.route,
            adapter=intent.adapter,
            ranges=intent.ranges,
        )

    def ranges(
        self,
        options: EncodeOptions,
        dtype: EmbeddingDtype,
        field: str = "output_dtype",
        *,
        of_images: bool = False,
    ) -> np.ndarray | None:
        """Return the calibration ranges to quantize vectors to `dtype`, float32 `[2, dim]`; None if
        the dtype needs none.

        Some models fix the range of all dimensions, and others need `jaxembed calibrate`, which
        measures texts: most values of images lie outside. The options describe the vectors, except
        that `dtype` replaces `options.output_dtype`, and `of_images` says if some are of images.
        Raises InvalidInput, which names the request field `field`, if no ranges are stored for such
        vectors.
        """
        if dtype not in NEEDS_RANGES:
            return None
        # `jaxembed calibrate` makes ranges only for dense vectors that are normalised
        which, normalize = None, options.normalize
        if "dense" not in options.outputs or options.outputs & PER_TOKEN:
            which = "dense vectors of whole inputs"
        elif (limits := self._spec.dense.range) is not None:
            if normalize:
                raise InvalidInput(
                    f"`{field}` of {dtype} is for the vectors of this model as they are; send "
                    "`normalize` of false",
                    field="normalize",
                )
            dimensions = options.dimensions or self._spec.dim
            return np.repeat(np.array(limits, np.float32)[:, None], dimensions, axis=1)
        elif not (self._spec.dense.normalize if normalize is None else normalize):
            which = "normalised vectors (set `normalize`)"
        elif of_images:
            which = "vectors of texts"
        if which is not None:
            others = ", ".join(t for t in get_args(EmbeddingDtype) if t not in NEEDS_RANGES)
            raise InvalidInput(
                f"`{field}` of {dtype} is only for {which}; other vectors support {others}",
                field=field,
            )
        kind = self.kind(options)
        spec = self._routes.specs[kind.route]
        stored = self._ranges.get(kind)
        if stored is None or stored.content_hash != spec.content_hash:
            why = "there are none" if stored is None else "those stored are of another checkpoint"
            command = f"jaxembed calibrate {self._name} TEXTS"
            if kind.route:
                command += f" --prompt-name {kind.route}"
            if kind.adapter is not None:
                command += f" --adapter-name {kind.adapter}"
            if kind.dimensions != spec.dim:
                command += f" --dimensions {kind.dimensions}"
            raise InvalidInput(
                f"`{field}` of {dtype} needs calibration ranges for these vectors, and {why}: run "
                f"`{command}` with the flags that load the model, and load it again",
                field=field,
            )
        return stored.values

    def kind(self, options: EncodeOptions) -> VectorKind:
        """Return the kind of dense vectors that the options ask for, which is the key of the stored
        calibration ranges. Raises WrongTask and InvalidInput."""
        self._check_outputs(options)
        options, number = self._with_prompt_of_adapter(options)
        route = self._route(options)
        spec = self._routes.specs[route]
        return VectorKind(
            route=route,
            pooling=spec.dense.pooling,
            adapter=spec.adapter_names[number - 1] if number else None,
            dimensions=options.dimensions or spec.dim,
        )

    def score(self, inputs: Sequence[Text | Pair], options: ScoreOptions) -> ScoreRequest:
        """Make the request for the logits of each text or pair, which classify or score it. Raises
        WrongTask or InvalidInput."""
        check_pairs(self._name, self._spec)
        check_task(self._name, self._spec, "classify")
        if options.max_chunks != 1:
            raise InvalidInput("only `rerank` divides documents", field="max_chunks")
        tokenization, adapter = self._tokenization(options), self._adapter_number(options.adapter)
        return ScoreRequest(
            inputs, tokenization, LOGITS, options.priority, options, adapter=adapter
        )

    def score_tokens(self, inputs: Sequence[Input], options: ScoreOptions) -> TokenScoreRequest:
        """Make the request for the logits of each token of texts. Raises WrongTask, and
        InvalidInput, also for token ids, which have no place in a text."""
        check_task(self._name, self._spec, "token_classify")
        for index, item in enumerate(inputs):
            if not isinstance(item, Text):
                raise InvalidInput(
                    "only texts can be divided into entities; token ids and pairs have no place "
                    "in a text, so send the text",
                    index=index,
                )
        tokenization, adapter = self._tokenization(options), self._adapter_number(options.adapter)
        return TokenScoreRequest(
            inputs, tokenization, TOKEN_LOGITS, options.priority, options, adapter=adapter
        )

    def rerank(
        self, query: Content, documents: Sequence[Content], options: ScoreOptions
    ) -> AnyRequest[Scores]:
        """Make the request for the logit of each document with the query, for a reranker, or for
        the scores of documents that the model reads together.

        The query is tokenized once. Equal documents are computed once, so they get equal logits and
        keep their order, unless they are read together. Documents may be empty, as in TEI. Raises
        EmptyInput for an empty query, InvalidInput, and WrongTask for images that the model does
        not take, a classifier, or an embedding model, whose requests `compare` makes.
        """
        if "rerank" not in SUPPORTED_TASKS[self._spec.task]:
            raise _wrong_task(self._name, self._spec, "rerank")
        is_image = [type(item) in IMAGES for item in documents]
        if type(query) in IMAGES:
            is_image = [True] * len(documents)
        if any(is_image):
            self.check_images()
            _check_of_texts(options)
        if options.weights is not None:
            raise InvalidInput(
                "`weights` are for models that compare several outputs; leave them out",
                field="weights",
            )
        if not query:
            raise EmptyInput("query")
        if self._takes_images:
            _check_texts(documents)
            try:
                _check_texts([query])
            except InvalidInput as error:
                raise error.at(None, field="query") from error
        tokenization, adapter = self._tokenization(options), self._adapter_number(options.adapter)
        if self._spec.listwise is not None:
            assert isinstance(query, str)
            if options.max_chunks != 1:
                raise InvalidInput(
                    "this model reads the documents of a query together and does not divide them; "
                    "leave `max_chunks_per_doc` and `long_documents` out",
                    field="max_chunks_per_doc",
                )
            return ListRequest(
                [documents] if documents else [],
                tokenization,
                frozenset({"dense"}),
                options.priority,
                query,
                adapter=adapter,
            )
        pairs = QueryRequest(
            documents, tokenization, LOGITS, options.priority, options, query, adapter=adapter
        )
        of_images = dataclasses.replace(pairs, route=IMAGE_ROUTE)
        return DividedRequest.by_kind(pairs, of_images, is_image)

    def compare(
        self, query: Content, documents: Sequence[Content], options: ScoreOptions
    ) -> tuple[AnyRequest[Embeddings], AnyRequest[Embeddings], Weights]:
        """Make the requests to rank documents by the similarity of their embeddings to the query's.

        Returns the request of the query, the request of the documents, and the weight of each
        output in the score. `compare_outputs` makes the scores from the answers and these weights.
        Query and documents get the routes and prompts of their roles. Dense vectors are normalised,
        so that their inner product is the cosine; but for a model with multi-vector embeddings, all
        vectors are normalised as its heads say. Documents may be empty texts; for a model that
        reads pages, documents are images. Raises WrongTask, InvalidInput, and EmptyInput for an
        empty query.
        """
        if not query:
            raise EmptyInput("query")
        return self._compare([query], documents, options)

    def compare_pairs(
        self, pairs: Sequence[tuple[str, str]], options: ScoreOptions
    ) -> tuple[AnyRequest[Embeddings], AnyRequest[Embeddings], Weights, list[int]]:
        """Make the requests to score pairs of a query and a document by their embeddings.

        Equal queries are computed once. Returns the request of the different queries, the request
        of the documents of all pairs, the weight of each output in the score, and for each pair the
        index of its query in the first request. Raises WrongTask, InvalidInput, and EmptyInput,
        with the index of the pair, for an empty query.
        """
        if options.max_chunks != 1:
            raise InvalidInput("only `rerank` divides documents", field="max_chunks")
        index_of: dict[str, int] = {}
        for index, (query, _) in enumerate(pairs):
            if not query:
                raise EmptyInput("query", index)
            index_of.setdefault(query, len(index_of))
        compared = self._compare(list(index_of), [document for _, document in pairs], options)
        return *compared, [index_of[query] for query, _ in pairs]

    def _compare(
        self, queries: Sequence[Content], documents: Sequence[Content], options: ScoreOptions
    ) -> tuple[AnyRequest[Embeddings], AnyRequest[Embeddings], Weights]:
        """Make the requests that `compare` describes, for several queries that are not empty."""
        check_task(self._name, self._spec, "embed")
        for option, field in PAIR_FIELDS.items():
            if getattr(options, option) is not None:
                raise InvalidInput(
                    f"`{field}` is for models that score pairs, and this one compares embeddings; "
                    "leave it out",
                    field=field,
                )
        _check_windows(options)
        requested = options.weights or ()
        if options.weights is not None and (
            len(requested) != len(REPRESENTATIONS)
            or min(requested) < 0
            or not 0 < sum(requested) < inf
        ):
            raise InvalidInput(
                f"`weights` must be three numbers of 0 or more, not all 0, for "
                f"{', '.join(REPRESENTATIONS)}. Given: {list(requested)}",
                field="weights",
            )
        for name, weight in zip(REPRESENTATIONS, requested, strict=False):
            if weight and name not in self._offered:
                raise InvalidInput(
                    f"`weights` has {weight} for {name}, which is not an output of this model; "
                    "send 0",
                    field="weights",
                )
        weights = weights_of(self._offered, options.weights)
        common = EncodeOptions(
            outputs=frozenset(weights),
            # None: as each head says
            normalize=None if "multi_vector" in self._offered else True,
            truncate=options.truncate,
            truncation_side=options.truncation_side,
            adapter=options.adapter,
            priority=options.priority,
        )
        if self._spec.reads_pages and not all(isinstance(query, str) for query in queries):
            raise InvalidInput(
                f"{self._name} takes texts as queries, and images only as documents; send a text",
                field="query",
            )
        try:
            query_request = self.embed(_as_inputs(queries), self.for_role("query", common))
        except InvalidInput as error:
            index = error.index if len(queries) > 1 else None
            raise error.at(index, error.field or "query") from error
        document_options = self.for_role("document", common)
        inputs = _as_inputs(documents)
        if self._spec.reads_pages or not IMAGES.isdisjoint(map(type, inputs)):
            _check_of_texts(options)
            intent = self.intent(RequestedOptions(document_options), with_images=True)
            tokenization = replace(intent.tokenization, may_be_empty=True)
            documents_request = self.request(inputs, replace(intent, tokenization=tokenization))
            return query_request, documents_request, weights
        if self._takes_images:
            _check_texts(inputs)
        plain = self.embed((), document_options)  # only to resolve the options
        assert isinstance(plain, EncodeRequest)
        tokenization = replace(
            plain.tokenization,
            max_windows=options.max_chunks,
            overlap=options.overlap_tokens,
            may_be_empty=True,
        )
        compared = ComparedRequest(
            inputs,
            tokenization,
            plain.outputs,
            plain.priority,
            plain.options,
            route=plain.route,
            adapter=plain.adapter,
        )
        return query_request, compared, weights

    def compute(
        self, inputs: Sequence[Input], outputs: Collection[str], options: EncodeOptions
    ) -> ComputeRequest:
        """Make the request for any outputs of the model, unchanged from its heads. Raises
        InvalidInput for outputs that the model lacks, and for invalid options."""
        offered = self._spec.widths
        unknown = [name for name in outputs if name not in offered]
        if unknown or not outputs:
            raise InvalidInput(
                f"`outputs` must be some of {', '.join(offered)}. "
                f"Given: {', '.join(unknown) or 'none'}",
                field="outputs",
            )
        options, adapter = self._with_prompt_of_adapter(options)
        prompt = ""
        if self._spec.task == "embed":
            prompt = self._processor.prompt(options.prompt, options.prompt_name)
        for field in ("prompt", "prompt_name"):
            if self._spec.task != "embed" and getattr(options, field) is not None:
                raise InvalidInput(
                    f"{KIND[self._spec.task]} does not take `{field}`; leave it out", field=field
                )
        tokenization = TokenizationOptions(
            prompt, self._truncate(options), options.truncation_side, role=self._role(options)
        )
        return ComputeRequest(
            inputs,
            tokenization,
            frozenset(name for name in offered if name in outputs),
            options.priority,
            route=self._route(options),
            adapter=adapter,
        )

    def for_role(self, role: Role, options: EncodeOptions) -> EncodeOptions:
        """Return the options with the route and the prompt of a role, such as "query".

        A route that is set in the options stays. An instruction, a prompt or an adapter that is set
        stays, and the role's prompt is then not used. A role without a prompt of its own gets no
        prompt, not even the default one, as in sentence-transformers. Raises UnknownRoute.
        """
        route = self.route_for(role) if options.route is None else options.route
        options, prompts = replace(options, route=route, role=role), self._spec.prompts
        given = {options.instruction, options.prompt, options.prompt_name}
        if self._spec.default_adapter is None:  # else adapters do not depend on prompts
            given.add(options.adapter)
        if given != {None}:
            return options
        chosen = prompt_for(role, prompts)
        if chosen in self._spec.adapter_names:  # in models such as Jina v3, prompts select adapters
            return replace(options, prompt_name=chosen)
        name = prompt_of_role(role, prompts)  # the choice of sentence-transformers
        return replace(options, prompt="" if name is None else prompts[name])

    def route_for(self, purpose: str, field: str = "prompt_name") -> str:
        """Return the route of texts with a purpose, such as "query".

        It is the route of that name, or else a route with the same role. If the model has a single
        route of texts, it is that one, whose name is "". Raises UnknownRoute, which names the
        request field `field`.
        """
        specs = self._routes.specs
        if "" in specs or purpose in specs:
            return "" if "" in specs else purpose
        route = same_purpose(purpose, specs)
        if route is None:
            raise UnknownRoute(purpose, tuple(specs), field)
        return route

    def route_of_prompt(self, prompt_name: str | None) -> str:
        """Return the route that has the name or the role of a prompt, or else the default route.

        A `prompt_name` of None means the prompt that the server's flags name, if any. Raises
        UnknownRoute if neither route exists.
        """
        prompt_name = prompt_name or self._text.default_prompt_name
        if prompt_name is not None:
            with suppress(UnknownRoute):
                return self.route_for(prompt_name)
        if self._routes.default is None:
            raise UnknownRoute(prompt_name, tuple(self._routes.specs))
        return self._routes.default

    def _role(self, options: EncodeOptions) -> Literal["query", "document"] | None:
        """Return the role of the texts, from the options or from the name of their prompt; None if
        they are neither queries nor documents."""
        name = options.prompt_name
        if name is None and options.prompt is None:
            name = self._processor.default_prompt_name
        role = options.role or (None if name is None else role_of(name))
        return role if role in ("query", "document") else None

    def _route(self, options: EncodeOptions) -> str:
        """Return the route that the options name, or else the route of their prompt. Raises
        UnknownRoute."""
        if options.route is None:
            return self.route_of_prompt(options.prompt_name)
        if options.route not in self._routes.specs:
            raise UnknownRoute(options.route, tuple(self._routes.specs))
        return options.route

    def _with_prompt_of_adapter(self, options: EncodeOptions) -> tuple[EncodeOptions, int]:
        """Return the options with the prompt of their adapter, and the adapter's number or 0.

        An adapter and a prompt of the same name belong together: if the options name only one of
        them, it chooses the other. Raises InvalidInput for an unknown adapter, and for an adapter
        with the prompt of another adapter.
        """
        number = self._adapter_number(options.adapter)
        if not self._spec.adapters or options.prompt is not None:
            return options, number
        names, name = self._spec.adapter_names, options.prompt_name
        if name is None and options.adapter is None:
            name = self._processor.default_prompt_name
        elif name is None and options.adapter in self._spec.prompts:
            return replace(options, prompt_name=options.adapter), number
        if options.adapter is not None and name in names and name != options.adapter:
            raise InvalidInput(
                f"`prompt_name` of `{name}` selects the adapter of that name, and the request "
                f"names the adapter `{options.adapter}`; send one of them",
                field="prompt_name",
            )
        return options, number or self._adapter_number(name if name in names else None)

    def _adapter_number(self, adapter: str | None) -> int:
        """Return the number of an adapter, counted from 1. None stands for the default adapter, and
        is 0 if there is none. Raises InvalidInput."""
        adapter = self._spec.default_adapter if adapter is None else adapter
        if adapter is None:
            return 0
        names = self._spec.adapter_names
        if adapter not in names:
            known = f"its adapters are {', '.join(names)}" if names else "it has no adapters"
            raise InvalidInput(f"the model has no adapter `{adapter}`; {known}", field="adapter")
        return names.index(adapter) + 1

    def _tokenization(self, options: ScoreOptions) -> TokenizationOptions:
        """Return the tokenization options of a request for scores. Raises InvalidInput."""
        check_positive("max_document_tokens", options.max_document_tokens)
        template, is_list = self._spec.template, self._spec.listwise is not None
        takes_instruction = is_list or (template is not None and template.takes_instruction)
        if options.instruction is not None and not takes_instruction:
            raise InvalidInput(
                "this model does not take an `instruction`; leave it out", field="instruction"
            )
        limit = self._text.max_instruction_tokens
        if options.instruction and limit is not None:
            self._processor.check_prompt(options.instruction, limit, "instruction")
        _check_windows(options)
        return TokenizationOptions(
            prompt="",
            truncate=self._truncate(options),
            side=options.truncation_side,
            instruction=options.instruction,
            max_second_tokens=options.max_document_tokens,
            max_windows=options.max_chunks,
            overlap=options.overlap_tokens,
        )

    def _truncate(self, options: EncodeOptions | ScoreOptions) -> bool:
        return self._text.truncate if options.truncate is None else options.truncate


def _check_texts(inputs: Sequence[Input | Content]) -> None:
    """Raise InvalidInput, with the index of the input, for a text that is an image's data URI."""
    for index, item in enumerate(inputs):
        parts = parts_of(item)
        for number, part in enumerate(parts):
            if isinstance(part, str) and part[: len(IMAGE_URI)].lower() == IMAGE_URI:
                error = InvalidInput("the text is a data URI of an image; send it as an image")
                raise error.at(index, part=number if len(parts) > 1 else None)


def _as_inputs(contents: Sequence[Content]) -> list[Input]:
    """Return queries or documents as inputs."""
    return [Text(item) if isinstance(item, str) else item for item in contents]


def _check_of_texts(options: ScoreOptions) -> None:
    """Raise InvalidInput for options that are only for texts, beside images."""
    given = {
        "max_chunks_per_doc": options.max_chunks != 1,
        "max_tokens_per_doc": options.max_document_tokens is not None,
    }
    for field, is_given in given.items():
        if is_given:
            raise InvalidInput(
                f"`{field}` is for texts, and the request has images; leave it out", field=field
            )


def _check_windows(options: ScoreOptions) -> None:
    """Raise InvalidInput if the number of windows or their overlap is out of range."""
    if not 1 <= options.max_chunks <= MAX_WINDOWS:
        raise InvalidInput(
            f"`max_chunks_per_doc` must be from 1 to {MAX_WINDOWS}. Given: {options.max_chunks}",
            field="max_chunks_per_doc",
        )
    if options.overlap_tokens is not None and options.overlap_tokens < 0:
        raise InvalidInput(
            f"`overlap_tokens` must be 0 or more. Given: {options.overlap_tokens}",
            field="overlap_tokens",
        )


def tasks_of(spec: ModelSpec) -> tuple[Task, ...]:
    """Return the tasks that the server's list of models shows for a model. They include "rerank"
    for a model with multi-vector embeddings, and are "rerank" alone for a model that reads
    documents together."""
    if spec.listwise is not None:
        return ("rerank",)
    return (
        (*SUPPORTED_TASKS[spec.task], "rerank")
        if "multi_vector" in spec.heads
        else SUPPORTED_TASKS[spec.task]
    )


def fit(spec: ModelSpec, task: Task) -> int | None:
    """Return how well a model fits a task; lower is better. 0: it is the model's own task. 1: the
    task is among `tasks_of` the model. 2: it is "rerank", which any embedding model can do by
    similarity. None: the model cannot do the task."""
    if spec.task == task:
        return 0
    if task in tasks_of(spec):
        return 1
    return 2 if (spec.task, task) == ("embed", "rerank") else None


def _no_task(purpose: str, field: str, tasks: Sequence[str]) -> InvalidInput:
    shown = ", ".join(tasks)
    return InvalidInput(
        f"`{field}` of {purpose!r} is not a task of this model; its tasks are {shown}", field=field
    )


def check_task(name: str, spec: ModelSpec, task: Task) -> None:
    """Raise WrongTask if the model `name` cannot do the task."""
    if fit(spec, task) is None:
        raise _wrong_task(name, spec, task)


def check_pairs(name: str, spec: ModelSpec) -> None:
    """Raise WrongTask if the model `name` reads the documents of a query together."""
    if spec.listwise is not None:
        raise WrongTask(
            f"{name} reads the documents of a query together, because a score depends on the other "
            "documents: it takes no single texts or pairs; rerank the documents of one query"
        )


def _wrong_task(name: str, spec: ModelSpec, task: Task) -> WrongTask:
    supported = " and ".join(tasks_of(spec))
    return WrongTask(f"{name} is {KIND[spec.task]}: it cannot {task}, only {supported}")


def check_dimensions(width: int, dimensions: int | None, field: str = "dimensions") -> None:
    """Raise InvalidInput unless `dimensions` is None or from 1 to the `width` of the vectors."""
    if dimensions is not None and not 0 < dimensions <= width:
        raise InvalidInput(
            f"`{field}` must be from 1 to {width}, the size of this model's "
            f"embeddings. Given: {dimensions}",
            field=field,
        )


def check_positive(field: str, value: int | None) -> None:
    """Raise InvalidInput if the value of a request field is less than 1."""
    if value is not None and value < 1:
        raise InvalidInput(f"`{field}` must be 1 or more. Given: {value}", field=field)
