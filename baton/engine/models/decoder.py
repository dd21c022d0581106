"""The decoder that every family runs: embed, layers, final norm, head. Differences between families are data in
`ModelConfig`, or other parts in a layer.

Owns: the parts and the order of operations, which follows transformers. Parameters belong to the parts
(`baton.engine.models.parts`); what each operation computes, rounding included, and with which kernels, is `DecoderOps`.
Knows no cache, no batch layout and no sampling: the tokens of all sequences come flattened, and `Attention` knows which
token attends to which.

Invariants: nothing here keeps state between steps, and each `forward` says anew which rows are those of adapters;
parameters are written only by loading, before `pack`. All tensors are on one device, and nothing is read back from it.
The caller runs forward and logits under `torch.inference_mode()`.

Letters: T tokens of the step, N rows that need logits, V vocabulary, E hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from baton.engine.attention.base import Attention, LayerRule
from baton.engine.models.adapters.low_rank import AdaptedRows, Adapters
from baton.engine.models.collectives import Collectives
from baton.engine.models.config import ModelConfig
from baton.engine.models.linear_weights import LinearWeight
from baton.engine.models.media import MediaRows
from baton.engine.models.ops.base import DecoderOps
from baton.engine.models.ops.choose import choose_ops
from baton.engine.models.parameters import Parameter
from baton.engine.models.parts.base import Part, PartSetup
from baton.engine.models.parts.embedding import make_embedding, make_head
from baton.engine.models.parts.layers import PreNormLayer, make_layer
from baton.engine.models.parts.norm import make_norm
from baton.engine.models.quantization.base import UNQUANTIZED, Quantization
from baton.engine.models.rope import ModelRotations, Rotations
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.models.taps import KeptStreams, Taps
from baton.wire.layout import LayerKv

_KV_SCALE = re.compile(r".*\.[kv]_scale")
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The dtypes a decoder runs in, by the names that settings and checkpoints use."""


class Decoder:
    """One model, or one rank's share of it, on one device. Construct, load (`baton.engine.models.loading`), then run.

    `is_divided`: the parts of several ranks are put together, the logits too. `has_all_layers`: there are no other
    stages. `has_head`: it computes logits; without, what `forward` returns is the next stage's input. `adapters`: what
    its products may have added. `taps`: who reads the residual stream between layers, if anybody.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: DecoderOps | None = None,
        shard: Shard = WHOLE,
        collectives: Collectives | None = None,
        quantization: Quantization = UNQUANTIZED,
    ) -> None:
        """Allocates all parameters without setting them. `ops`: `None` for what is fastest on `device`.

        The layers of a `shard` are those of its stage, and compute its share of heads and rows. `collectives` put the
        shares of a stage's ranks together; without, nothing does. Every rank then makes the same calls, and the first
        of the last stage has the logits. Raises `ModelLoadError` for a checkpoint's quantization that does not fit the
        model, and for what cannot be divided.
        """
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        chosen = choose_ops(self.device) if ops is None else ops
        self.adapters = Adapters()
        self.taps: Taps | None = None
        setup = PartSetup(dtype, self.device, chosen, shard, collectives, quantization, self.adapters)
        self.is_divided = collectives is not None
        self.has_all_layers = shard.num_stages == 1
        self.has_head = shard.is_last_stage
        self._rotations = ModelRotations(config, self.device)
        self._embedding = make_embedding(config, setup) if shard.is_first_stage else None
        ropes, layers = self._rotations.of_layer, shard.layers_of(config.num_layers)
        self._layers = [make_layer(layer, config, ropes[layer], setup) for layer in layers]
        self._norm = make_norm("norm", config.names.final_norm, config, setup) if self.has_head else None
        self._head = make_head(self._embedding, config, setup) if self.has_head else None

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        media: MediaRows | None = None,
        adapted: AdaptedRows = (),
    ) -> Tensor:
        """Run all layers over the step's tokens.

        token_ids and positions: [T] int64 on this decoder's device, sequences one after another, prompts and decodes
        mixed as `attention` has planned. In a later stage, what the stage before has returned takes the place of token
        ids. `media`: the tokens of media among them; `adapted`: those of adapters. Returns the residual stream [T, E]
        before the final norm, which `logits` applies to the rows that need it.
        """
        self.adapters.rows = adapted
        residual = self.embed(token_ids, positions)
        if media is not None:
            residual.index_copy_(0, media.places, media.rows[0])
            positions = positions if media.positions is None else media.positions
        rotations = self.rotations(positions)
        return residual.add_(self.run_layers(residual, rotations, attention, media))

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The residual stream [T, E] that the layers begin with, which the caller may change: of token ids and
        positions, each [T] int64. In a later stage the residual stream itself is given, instead of token ids."""
        return token_ids.clone() if self._embedding is None else self._embedding(token_ids, positions)

    def trial_inputs(self, num_tokens: int) -> Tensor:
        """Token ids [T], or in a later stage a residual stream [T, E], with fixed values to try the decoder with."""
        if self._embedding is not None:
            return torch.arange(num_tokens, device=self.device) % self.config.vocab_size
        values = torch.linspace(-1.0, 1.0, num_tokens * self.config.hidden_size, device=self.device)
        return values.to(self.dtype).view(num_tokens, -1)

    def rotations(self, positions: Tensor) -> Rotations:
        """The rotations of positions [T] int64, for all layers."""
        return self._rotations.tables(positions, self.dtype)

    def run_layers(
        self, residual: Tensor, rotations: Rotations, attention: Attention, media: MediaRows | None = None
    ) -> Tensor:
        """Add to `residual` [T, E] in place what all layers add to it, but for what the last MLP adds: that is
        returned, [T, E]. `media` add their own behind the first layers."""
        delta: Tensor | None = None
        deeper, taps = () if media is None else media.rows[1:], self.taps
        for number, layer in enumerate(self._layers):
            if taps is not None:
                taps.pass_by(number, residual, delta)
            delta = layer.forward(residual, delta, rotations, attention)
            if media is not None and number < len(deeper):
                residual.index_add_(0, media.places, deeper[number])
        assert delta is not None  # a model has layers
        if taps is not None:
            taps.pass_by(len(self._layers), residual, delta)
        return delta

    def attend(self, residual: Tensor, rotations: Rotations, attention: Attention) -> Tensor:
        """`run_layers` up to what the heads of the last layer find, [T, Hq, D]; without taps, of a decoder that
        `is_recordable`."""
        delta: Tensor | None = None
        for layer in self._layers[:-1]:
            delta = layer.forward(residual, delta, rotations, attention)
        return self._last_layer.attend(residual, delta, rotations, attention)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of `run_layers`, for any rows: `residual` [N, E], and what the heads of `attend` have found [N, Hq,
        D] for them."""
        return self._last_layer.finish(residual, attended)

    @property
    def _last_layer(self) -> PreNormLayer:
        layer = self._layers[-1]
        assert isinstance(layer, PreNormLayer)  # the kind that is recorded
        return layer

    def tapped(self) -> list[Tensor]:
        """The residual streams [T, E] that the taps of the last `forward` have kept, in the order of the taps."""
        return self.taps.streams if isinstance(self.taps, KeptStreams) else []

    def normed(self, hidden: Tensor) -> Tensor:
        """The last hidden states [N, E] of rows [N, E] that `forward` returned."""
        assert self._norm is not None
        return self._norm(hidden, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V], float32, of rows [N, E] that `forward` returned."""
        return self.head(hidden, None).to(torch.float32)

    def head(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Logits [N, V], in the model's dtype, of rows [N, E] of the residual stream. `delta` [N, E], which was not
        added to them yet, is added in place. Only with `has_head`."""
        assert self._norm is not None
        return self.project(self._norm(residual, delta))

    def project(self, normed: Tensor) -> Tensor:
        """Logits [N, V], in the model's dtype, of last hidden states [N, E]. Only with `has_head`."""
        assert self._head is not None
        return self._head(normed)

    @property
    def lookup_table(self) -> LinearWeight | None:
        """The table [V, E] whose rows `embed` returns as they are; None where it returns something else."""
        return None if self._embedding is None else self._embedding.lookup_table

    @property
    def is_recordable(self) -> bool:
        """Whether every layer is made of operations alone, one after another. Their arguments may then be noted once,
        and computed with again for any number of tokens."""
        return _is_plain(self.config)

    @property
    def num_heads(self) -> int:
        """The number of query heads of a layer."""
        return self.config.num_heads

    @property
    def layer_kvs(self) -> tuple[LayerKv, ...]:
        """The KV that each layer of this stage stores for a token; a KV pool for this model must have room for it."""
        return tuple(layer.kv for layer in self._layers)

    @property
    def layer_rules(self) -> tuple[LayerRule, ...]:
        """For each layer of this stage, how it attends."""
        return tuple(layer.rule for layer in self._layers)

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, which loading fills. Only before `pack`."""
        for part in self.parts():
            yield from part.parameters()

    @property
    def architecture(self) -> str:
        """What its checkpoint says that it is."""
        return self.config.architecture

    def leaves_out(self, name: str) -> bool:
        """Whether a tensor of its checkpoint is another part's, another stage's, or a scale that KV does not need."""
        config = self.config
        drafts = (f"{config.names.layer(config.num_layers + number)}." for number in range(config.num_draft_layers))
        has_kv_scales = config.quantization is not None and config.quantization.has_kv_scales
        is_other = not self.has_all_layers or name.startswith((*drafts, *config.other_parts))
        return is_other or (has_kv_scales and _KV_SCALE.fullmatch(name) is not None)

    def pack(self) -> None:
        """Bring the weights into the formats that this device computes with fastest. Call once, after loading;
        parameters cannot be written afterwards."""
        for part in self.parts():
            part.pack()

    def parts(self) -> Iterator[Part]:
        """All parts, each of which may be packed when its parameters are loaded."""
        if self._embedding is not None:
            yield self._embedding
        for layer in self._layers:
            yield from layer.parts()
        if self._norm is not None and self._head is not None:
            yield self._norm
            yield self._head


def _is_plain(config: ModelConfig) -> bool:
    kinds = (config.block, config.norm, config.mlp, config.hidden_act, config.multipliers.residual)
    has_shared_expert = config.experts is not None and config.experts.shared_size > 0
    has_plain_parts = config.latent is None and config.states is None and config.qk_norm != "whole"
    return has_plain_parts and not has_shared_expert and kinds == ("pre", "rms", "gated", "silu", 1.0)
