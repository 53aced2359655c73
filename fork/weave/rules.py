# SPDX-License-Identifier: Apache-2.0
"""Facts about individual decoder layers that the analysis cannot find, with reasons.

Keys are `path:Class`, with the path below `vllm/` and without `.py`. Three tables:
`RULES` assist the analysis or replace a part of it, `REFUSED` layers have no hook
points, `NOT_TAPPED` classes look like decoder layers of a language model but are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A call placed by hand: `arguments = residual_tap.method(self, point, ...)`."""

    point: str
    statement: str
    """Beginning of the statement at which to insert; exactly one must match."""
    method: str = "pair"
    arguments: tuple[str, ...] = ("hidden_states", "residual")
    after: bool = False
    within: str = "forward"
    """The method of the class that has the statement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sometimes:
    """Optional points that only some layers of a class have, as configured."""

    points: tuple[str, ...]
    cases: Mapping[str, bool]
    """Outcomes of conditions in `forward` for which the points are proven."""
    lacking: str
    """Expression over `self` that is true for a layer without them.

    Evaluated at start-up through `hook_points_lacking`.
    """
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Facts about one class that its `forward` does not show."""

    reason: str
    cases: tuple[Mapping[str, bool], ...] = ({},)
    """Combinations of outcomes of conditions, by source text; no others are analysed.

    A condition that is not listed may have both outcomes.
    """
    unless: Mapping[str, str] = field(default_factory=dict)
    """By expression over `self`: why a layer for which it is true has no hook points.

    Evaluated at start-up through `hook_points_unless`.
    """
    sometimes: tuple[Sometimes, ...] = ()
    adding: tuple[str, ...] = ()
    """Norms built elsewhere that return `(norm(x + residual), x + residual)`."""
    made: Mapping[str, str] = field(default_factory=dict)
    """The class of a submodule, where the source does not show it."""
    passing: tuple[str, ...] = ()
    """Submodules that return their first argument plus their own output."""
    beside: tuple[str, ...] = ()
    """Submodules other than mixer and MLP that add to the stream after the MLP."""
    inline: tuple[str, ...] = ()
    """Methods of the class to inline where `forward` calls them."""
    run: str = ""
    """The parameter of `forward` that has the number of the layer's run in a pass."""
    runs: str = ""
    """Expression over `self`: pairs of a run and the attention that it uses.

    The attention's `layer_name` has the layer index of the run.
    """
    partial_when: Mapping[str, str] = field(default_factory=dict)
    """By point: the expression that is true if the branch is a partial sum."""
    split: Mapping[str, str] = field(default_factory=dict)
    """By point: the expression that is true if a rank has only its share of the tokens.

    `cases` must decide it.
    """
    first: tuple[str, ...] = ()
    """Statements to insert after the first tap."""
    last: tuple[str, ...] = ()
    """Statements to insert after the last tap."""
    anchors: tuple[Anchor, ...] = ()
    """Calls placed by hand, which replace those of the analysis for their points.

    Those of optional points are proven like the analysis's own.
    """
    points: tuple[str, ...] = ("pre_attn", "post_attn", "post_block")
    streams: str = ""
    """Expression over `self`: the number of streams, of a layer with several.

    Its points are `streams_pre` and `streams_post`, placed by hand and proven.
    """
    otherwise: tuple[str, Rule] | None = None
    """An expression over `self`, and the rule of layers for which it is true.

    They have the points of that rule, of several streams, and no others.
    """
    several_mixers: bool = False
    """Whether a token mixer may add to the stream after `post_attn`."""
    proven: bool = True
    """False if the proof does not apply; the reason then says how it was checked."""

    def assumed(self, point: str) -> Mapping[str, bool]:
        """The outcomes of conditions for which an optional point is proven."""
        own = (one.cases for one in self.sometimes if point in one.points)
        return next(own, {})

    @property
    def enters_split(self) -> str:
        """The expression in `split` for the tensors that enter the layer, or empty."""
        return self.split.get("pre_attn", "")


NEVER_GIVEN: Mapping[str, bool] = {
    "encoder_hidden_states is not None": False,
    "encoder_hidden_states is None": True,
}
"""Cases of layers from outside the release: a decoder-only model has no encoder."""

_MODELS = "model_executor/models/"
_SHARE = "between layers a rank may hold only its share of the tokens"
_POINTS = ("pre_attn", "post_attn", "post_block", "mlp_in", "mlp_out")


_LONE_TOKEN = (
    "if self.use_sequence_parallel_moe:\n"
    "    hidden_states, residual = residual_tap.lone_token(\n"
    "        self, positions.shape[0], hidden_states, residual\n"
    "    )"
)


def _everywhere(condition: str) -> dict[str, str]:
    """`Rule.split` of a layer whose tokens are split everywhere but in attention."""
    return dict.fromkeys(_POINTS, condition)


def _either(
    condition: str, others: Mapping[str, bool] | None = None
) -> tuple[Mapping[str, bool], ...]:
    """`Rule.cases` with both outcomes of `condition`."""
    return tuple({condition: value, **(others or {})} for value in (False, True))


def _scaled_in_half(condition: str) -> tuple[Sometimes, ...]:
    """A layer that scales the stream behind its attention in float16 only."""
    half = "hidden_states.dtype == torch.float16"
    return (
        Sometimes(
            points=("attn_add",),
            cases={half: False},
            lacking=f"{condition} and self.input_layernorm.weight.dtype == "
            "torch.float16",
            why="in float16 the stream is scaled behind what attention adds",
        ),
    )


_HYPER = (
    "hyper-connections: a layer takes in the streams of the layer before only inside "
    "a fused kernel that mixes and norms them at once"
)


def _several_streams(reason: str, streams: str, *anchors: Anchor, **facts: Any) -> Rule:
    """The rule of a layer with several streams; `facts` are further fields."""
    return Rule(
        reason=reason,
        streams=streams,
        points=("streams_pre", "streams_post"),
        anchors=anchors,
        **facts,
    )


_MIXED = (
    "hyper-connections: each sublayer reads a mix of the streams, and is written to "
    "all of them"
)
_HY_V4_STREAMS = _several_streams(
    _MIXED,
    "self.config.hc_mult",
    Anchor(
        point="streams_pre",
        method="streams",
        arguments=("hidden_states",),
        statement="hidden_states = self.hc_attn_layer.prepare_input(",
        after=True,
        within="_forward_ihc",
    ),
    Anchor(
        point="streams_post",
        method="streams",
        arguments=("hidden_states",),
        statement="return hidden_states, None",
        within="_forward_ihc",
    ),
    cases=({"self.enable_ihc": True},),
    inline=("_forward_ihc",),
    beside=("hc_attn_layer", "hc_mlp_layer"),
)
_POST_LN = (
    "the other outcome is post-LN: the stream itself is normed, the same places "
    "hold it and everything later is computed from it"
)
_LATENT = "not isinstance(self.self_attn, DeepseekAttention)"
_BUILT_IN_BASE = "its RMSNorms are built by a base class in another module"

RULES: Mapping[str, Rule] = {
    f"{_MODELS}mistral:MistralDecoderLayer": Rule(
        reason=_BUILT_IN_BASE,
        adding=("input_layernorm", "post_attention_layernorm"),
    ),
    f"{_MODELS}interns2_mobius:InternS2MobiusDecoderLayer": Rule(
        reason="its norms are GemmaRMSNorm under a name imported from qwen3_5",
        adding=("input_layernorm", "post_attention_layernorm"),
        cases=_either("self.use_attn_reduce_scatter_for_moe"),
        split=_everywhere("self.use_attn_reduce_scatter_for_moe"),
    ),
    f"{_MODELS}qwen3_next:Qwen3NextDecoderLayer": Rule(
        reason=_SHARE,
        cases=_either("self.use_attn_reduce_scatter_for_moe"),
        split=_everywhere("self.use_attn_reduce_scatter_for_moe"),
    ),
    f"{_MODELS}deepseek_v2:DeepseekV2DecoderLayer": Rule(
        reason=f"{_SHARE}; the first such layer is given all of them; what the share "
        "of a single token is, upstream's layers cannot tell by its shape",
        cases=tuple(
            {
                "self.use_sequence_parallel_moe": split,
                "input_is_sequence_parallel": entry,
            }
            for split, entry in ((False, False), (True, False), (True, True))
        ),
        split=_everywhere("self.use_sequence_parallel_moe")
        | {"pre_attn": "input_is_sequence_parallel"},
        sometimes=_scaled_in_half(_LATENT),
        last=(_LONE_TOKEN,),
        anchors=(
            Anchor(
                point="pre_attn",
                statement="input_is_sequence_parallel = (",
                after=True,
            ),
        ),
    ),
    f"{_MODELS}AXK1:AXK1DecoderLayer": Rule(
        reason="in float16 it scales the stream", sometimes=_scaled_in_half(_LATENT)
    ),
    f"{_MODELS}openpangu:OpenPanguDecoderLayer": Rule(
        reason="in float16 it scales the stream",
        sometimes=_scaled_in_half("self.routed_scaling_factor is not None"),
    ),
    f"{_MODELS}longcat_flash:FlashDecoderLayer": Rule(
        reason="two attentions and two MLPs a block: post_attn is the first "
        "attention's; the norms are RMSNorms in a ModuleList",
        adding=("input_layernorm", "post_attention_layernorm"),
        anchors=(
            Anchor(
                point="post_attn",
                statement="hidden_states, residual = self.post_attention_layernorm[0](",
            ),
        ),
        several_mixers=True,
    ),
    f"{_MODELS}nemotron_nas:DeciLMDecoderLayer": Rule(
        reason="attention or FFN may be missing: the points stay where both paths "
        "pass, and the pair flows through unchanged",
        anchors=(
            Anchor(
                point="post_attn",
                statement="if not self._is_no_op_ffn:",
            ),
            Anchor(
                point="post_block",
                statement="return hidden_states, residual",
            ),
        ),
    ),
    "models/deepseek_v32/nvidia/model:DeepseekV32DecoderLayer": Rule(
        reason="the first layer may be given its normed input along with the stream; "
        "with a tap in the layer it must norm what the tap returned; "
        f"{_SHARE}",
        cases=_either("self.use_sequence_parallel", {"attn_in is not None": False}),
        split=_everywhere("self.use_sequence_parallel"),
        first=("attn_in = None if self.residual_taps else attn_in",),
    ),
    f"{_MODELS}cohere2_moe:Cohere2MoeDecoderLayer": Rule(
        reason="its norm comes from a function; with RMSNorm a layer leaves its branch "
        "apart, and a second stream of the device may run the MLP beside attention",
        cases=({"self.uses_rms_norm": False, "self.dual_stream is not None": False},),
        made={"input_layernorm": "LayerNorm"},
        unless={
            'getattr(self, "uses_rms_norm", False)': "its RMSNorm adds the branch of "
            "the layer before",
            'getattr(self, "dual_stream", None) is not None': "attention and MLP run "
            "in two streams of the device, and in one with "
            "VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD=0",
        },
    ),
    "models/step5/nvidia/model:Step5DecoderLayer": Rule(
        reason=f"{_SHARE}; its norms come from a function",
        adding=("input_layernorm", "post_attention_layernorm"),
        inline=("_add_for_residual", "_cast_for_residual", "_cast_for_param_op"),
        cases=_either(
            "self.use_sequence_parallel", {"self.fp32_residual_connection": False}
        ),
        unless={
            "self.fp32_residual_connection": "its stream is in float32, wider than the "
            "model's dtype",
        },
        split=_everywhere("self.use_sequence_parallel"),
    ),
    "models/deepseek_v32/amd/model:DeepseekV32DecoderLayer": Rule(
        reason="ranks other than the first may set the MLP's output to zeros, which "
        "the next norm sums over ranks: the points are the same places",
        cases=({"self.zero_mlp_output": False},),
    ),
    "models/minimax_m3/nvidia/model:MiniMaxM3DecoderLayer": Rule(
        reason="whether a layer's FFN output is summed over ranks in the layer or by "
        "the next norm is settled when the model is built",
        partial_when={
            "pre_attn": "self.fuse_input_allreduce",
            "post_block": "self.ffn_all_reduce_deferred",
        },
    ),
    "models/kimi_k3/amd/linear:KimiDecoderLayer": Rule(
        reason="with attention residuals there is no running sum",
        cases=({"self.use_attn_residuals": False},),
        unless={
            "self.use_attn_residuals": "attention residuals: blocks read a learned mix "
            "of earlier blocks, there is no running sum"
        },
    ),
    "models/kimi_k3/nvidia/model:KimiDecoderLayer": Rule(
        reason="with attention residuals there is no running sum; the norms are "
        "called in methods of their own; an attention whose last product scatters "
        "its result over the ranks itself leaves what the layer's own call does",
        cases=_either(
            "self.use_sequence_parallel",
            {"self.use_attn_res": False, "hidden_states.shape[0] == M": True},
        ),
        split=_everywhere("self.use_sequence_parallel"),
        unless={
            "self.use_attn_res": "attention residuals: blocks read a learned mix "
            "of earlier blocks, there is no running sum",
        },
        inline=("_pre_attn_norm", "_post_attn_norm"),
    ),
    "models/glm5next/common/model:Glm5NextDecoderLayer": Rule(
        reason="without hyper-connections the block is an ordinary one",
        cases=({"self.mhc": False, "self.is_mtp_layer": False},),
        unless={
            "self.mhc": _HYPER,
            "self.is_sequence_parallel and not self.mhc": "use_sequence_parallel_moe "
            "without hyper-connections: upstream's attention is given a rank's share "
            "of the tokens, with the positions of all",
        },
    ),
    **{
        f"models/hy_v4/{device}/model:HYV4DecoderLayer": Rule(
            reason="without hyper-connections the block is an ordinary one",
            cases=({"self.enable_ihc": False},),
            inline=("_forward_normal",),
            otherwise=("self.enable_ihc", _HY_V4_STREAMS),
        )
        for device in ("amd", "nvidia")
    },
    f"{_MODELS}hrm_text:HrmTextDecoderLayer": Rule(
        reason="two stacks of layers run several times a pass: each run is a layer",
        run="current_step",
        runs="self.self_attn.attn_per_step.items()",
    ),
    f"{_MODELS}iquest_loopcoder:LoopCoderDecoderLayer": Rule(
        reason="all layers run several times a pass: each run is a layer",
        run="loop_idx",
        runs="enumerate(self.self_attn.attn)",
    ),
    f"{_MODELS}falcon:FalconDecoderLayer": Rule(
        reason="sequential and parallel blocks in one forward; only these flags occur "
        "together (reduce_row_parallel_results says that the block is sequential)",
        anchors=(
            Anchor(
                point="post_attn",
                method="stream",
                arguments=("residual",),
                statement="residual += attention_output",
                after=True,
            ),
            Anchor(
                point="post_attn",
                method="partial",
                arguments=("attention_output", "residual"),
                statement="mlp_output += attention_output",
            ),
            Anchor(
                point="mlp_in",
                method="value",
                arguments=("mlp_layernorm_out",),
                statement="mlp_output, mlp_bias = self.mlp(",
            ),
            *(
                Anchor(
                    point=point,
                    method="value",
                    arguments=("mlp_output",),
                    statement="if self.reduce_row_parallel_results and mlp_bias is not",
                    after=True,
                )
                for point in ("mlp_out", "mlp_add")
            ),
        ),
        cases=(
            {
                "self.config.new_decoder_architecture": False,
                "self.config.parallel_attn": False,
                "self.reduce_row_parallel_results": True,
            },
            *(
                {
                    "self.config.parallel_attn": True,
                    "self.reduce_row_parallel_results": False,
                    "attention_bias is not None": False,
                    "mlp_bias is not None": False,
                    "self.config.num_ln_in_parallel_attn == 2": norms == 2,
                    "self.config.num_ln_in_parallel_attn == 1": norms == 1,
                }
                for norms in (1, 2)
            ),
        ),
        unless={
            "self.config.bias and not self.reduce_row_parallel_results": "a parallel "
            "block with biases adds the attention's bias after the MLP's output"
        },
    ),
    **{
        f"{_MODELS}granitemoehybrid:GraniteMoeHybrid{kind}DecoderLayer": Rule(
            reason="every block has a shared MLP or experts, or both",
            cases=(
                {"self.shared_mlp is None": False},
                {
                    "self.shared_mlp is None": True,
                    "self.block_sparse_moe is not None": True,
                },
            ),
        )
        for kind in ("Mamba", "Attention")
    },
    f"{_MODELS}gemma4:Gemma4DecoderLayer": Rule(
        reason="after the MLP a per-layer embedding is added and the stream is scaled; "
        "post_block is what leaves the layer",
        beside=("per_layer_projection",),
        sometimes=(
            Sometimes(
                points=("mlp_in", "mlp_out"),
                cases={"self.enable_moe_block": False},
                lacking="self.enable_moe_block",
                why="an MLP and experts read different norms of the stream",
            ),
        ),
    ),
    f"{_MODELS}zamba2:Zamba2HybridLayer": Rule(
        reason="the shared transformer only feeds the mamba layer inside, which adds "
        "its output to the stream",
        passing=("mamba_decoder",),
    ),
    f"{_MODELS}bloom:BloomBlock": Rule(
        reason=_POST_LN,
        cases=({"self.apply_residual_connection_post_layernorm": False},),
    ),
    f"{_MODELS}chatglm:GLMBlock": Rule(
        reason=_POST_LN,
        cases=({"self.apply_residual_connection_post_layernorm": False},),
    ),
    f"{_MODELS}opt:OPTDecoderLayer": Rule(
        reason=_POST_LN,
        cases=({"self.do_layer_norm_before": True},),
    ),
    f"{_MODELS}dbrx:DbrxBlock": Rule(
        reason="the attention is added inside norm_attn_norm, which has post_attn; "
        "read by hand: both returned tensors come from that tap",
        points=("pre_attn", "post_block"),
        anchors=(
            Anchor(
                point="pre_attn",
                method="stream",
                arguments=("hidden_states",),
                statement="hidden_states, residual = self.norm_attn_norm(",
            ),
            Anchor(
                point="post_block",
                method="stream",
                arguments=("hidden_states",),
                statement="return hidden_states",
            ),
        ),
        proven=False,
    ),
    f"{_MODELS}dbrx:DbrxFusedNormAttention": Rule(
        reason="the part of DbrxBlock that adds the attention's output; read by hand: "
        "residual and norm_2 are computed from the tap",
        points=("post_attn",),
        anchors=(
            Anchor(
                point="post_attn",
                method="stream",
                arguments=("hidden_states",),
                statement="hidden_states = residual + x",
                after=True,
            ),
        ),
        proven=False,
    ),
    f"{_MODELS}gemma3n:Gemma3nDecoderLayer": _several_streams(
        "AltUp: a block predicts all streams, computes its sublayers on one of them, "
        "and corrects all of them by it",
        "self.altup.altup_num_inputs",
        Anchor(
            point="streams_pre",
            method="streams_first",
            arguments=("hidden_states",),
            statement="predictions = self.altup.predict(hidden_states)",
        ),
        Anchor(
            point="streams_post",
            method="streams_first",
            arguments=("corrected_predictions",),
            statement="return corrected_predictions",
        ),
    ),
    "models/deepseek_v4/cpu/model:DeepseekV4DecoderLayer": _several_streams(
        _MIXED,
        "self.hc_mult",
        Anchor(
            point="streams_pre",
            method="streams",
            arguments=("x",),
            statement="if not self.use_fused_mhc",
        ),
        Anchor(
            point="streams_post",
            method="streams",
            arguments=("x",),
            statement="return x, None, None, None",
            within="_forward_unfused_post_pre",
        ),
        cases=({"self.use_fused_mhc": False},),
        unless={"self.use_fused_mhc": _HYPER},
        inline=("_forward_unfused_post_pre",),
    ),
}

_DEFERRED = (
    "the MLP's output is convolved, added and normed in one kernel of the next layer: "
    "the stream and its norm leave it together, an intervention could not reach both"
)

_ON_SPHERE = (
    "a layer turns the stream on a sphere towards its one sublayer's output and "
    "returns it at once; the layers of the loop run several times a pass, unnumbered"
)
_FUSED_DECODE = (
    "for small batches a kernel adds and norms beside the layer's own statements: "
    "interventions would act in large batches only"
)
_FUSED_BOUNDARY = (
    "a sublayer's output is normed and added, and the sum normed for the next "
    "sublayer, in one kernel: the stream and its norm leave it together"
)

REFUSED: Mapping[str, str] = {
    f"{_MODELS}dory:DoryDecoderLayer": _ON_SPHERE,
    "models/beam/nvidia/model:BeamDecoderLayer": _FUSED_BOUNDARY,
    "models/flint/model:FlintDecoderLayer": _FUSED_DECODE,
    "models/muse_spark/amd/model:MuseSpark1xDecoderLayer": _FUSED_BOUNDARY,
    "models/muse_spark/nvidia/model:MuseSpark1xDecoderLayer": _FUSED_BOUNDARY,
    "models/inkling/amd/model:InklingDecoderLayer": _DEFERRED,
    "models/inkling/nvidia/model:InklingDecoderLayer": _DEFERRED,
    "models/deepseek_v4/amd/model:DeepseekV4DecoderLayer": _HYPER,
    "models/deepseek_v4/nvidia/model:DeepseekV4DecoderLayer": _HYPER,
    "models/deepseek_v4/xpu/model:DeepseekV4DecoderLayer": _HYPER,
    "models/deepseek_v41/amd/model:DeepseekV4DecoderLayer": _HYPER,
    "models/deepseek_v41/nvidia/model:DeepseekV4DecoderLayer": _HYPER,
    "models/qwen4_exp/amd/model:Qwen4ExpDecoderLayer": _HYPER,
    "models/qwen4_exp/nvidia/model:Qwen4ExpDecoderLayer": _HYPER,
}

_DRAFT = "a draft model's layer: proposals are checked by the model that is tapped"
_ENCODER = "a layer of an encoder: nothing is generated"
_PREFIX = "its layers read pictures through a prefix or a second attention: not tried"
_PART = "a part of a block, not a block: it does not add to the stream"

NOT_TAPPED: Mapping[str, str] = {
    f"{_MODELS}whisper:WhisperEncoderLayer": _ENCODER,
    f"{_MODELS}whisper_causal:WhisperCausalEncoderLayer": _ENCODER,
    f"{_MODELS}nemotron_parse:BartDecoderLayer": "a base class whose forward no model "
    "runs",
    f"{_MODELS}nemotron_parse3_5:MBartDecoderLayer": _PREFIX,
    f"{_MODELS}cohere_eagle:CohereEagleDecoderLayer": _DRAFT,
    f"{_MODELS}deepseek_eagle3:DeepseekV2Eagle3DecoderLayer": _DRAFT,
    f"{_MODELS}gemma4_dspark:Gemma4DSparkDecoderLayer": _DRAFT,
    f"{_MODELS}gemma4_mtp:Gemma4MTPDecoderLayer": _DRAFT,
    f"{_MODELS}llama_eagle:LlamaDecoderLayer": _DRAFT,
    f"{_MODELS}llama_eagle3:LlamaDecoderLayer": _DRAFT,
    f"{_MODELS}minicpm_eagle:EagleMiniCPMDecoderLayer": _DRAFT,
    f"{_MODELS}mistral_eagle:EagleMistralDecoderLayer": _DRAFT,
    f"{_MODELS}nemotron_h_mtp:NemotronHMTPAttentionDecoderLayer": _DRAFT,
    f"{_MODELS}nemotron_h_mtp:NemotronHMTPMoEDecoderLayer": _DRAFT,
    f"{_MODELS}qwen3_dflash:DFlashQwen3DecoderLayer": _DRAFT,
    f"{_MODELS}qwen3_dflash2:DFlash2Qwen3DecoderLayer": _DRAFT,
    f"{_MODELS}qwen3_eagle3:Qwen3Eagle3DecoderLayer": _DRAFT,
    "models/beam/nvidia/dflash2:DFlash2BeamDecoderLayer": _DRAFT,
    "models/kimi_k3/nvidia/dspark_mla:K3DSparkDecoderLayer": _DRAFT,
    "models/muse_spark/common/dspark:MuseSparkDSparkDecoderLayer": _DRAFT,
    f"{_MODELS}embedding_gemma2:EmbeddingGemma2DecoderLayer": "an embedding model's "
    "layer: nothing is generated",
    f"{_MODELS}openai_privacy_filter:OpenAIPrivacyFilterDecoderLayer": "a token "
    "classifier's layer: nothing is generated",
    f"{_MODELS}falcon_h1:FalconH1AttentionDecoderLayer": _PART,
    f"{_MODELS}falcon_h1:FalconH1SSMDecoderLayer": _PART,
    f"{_MODELS}zamba2:Zamba2AttentionDecoderLayer": _PART,
    f"{_MODELS}iquest_loopcoder:LoopGateProjection": "a gate between two runs of a "
    "layer, not a block",
}

SINCE: Mapping[str, frozenset[str]] = {
    "0.33.0": frozenset(
        (
            f"{_MODELS}dory:DoryDecoderLayer",
            f"{_MODELS}nemotron_parse3_5:MBartDecoderLayer",
            "models/beam/nvidia/dflash2:DFlash2BeamDecoderLayer",
            "models/beam/nvidia/model:BeamDecoderLayer",
            "models/flint/model:FlintDecoderLayer",
            "models/muse_spark/amd/model:MuseSpark1xDecoderLayer",
            "models/muse_spark/common/dspark:MuseSparkDSparkDecoderLayer",
            "models/muse_spark/nvidia/model:MuseSpark1xDecoderLayer",
            "models/step5/nvidia/model:Step5DecoderLayer",
        )
    ),
}
"""By release: the classes of the tables above that upstream has from it on."""

_BETWEEN = (
    "between some blocks the model itself changes the stream ({what}), so post_block "
    "of one layer is not pre_attn of the next there"
)
_DEEPSTACK = _BETWEEN.format(what="features of images or audio are added")

LOOPS: Mapping[str, str] = {
    f"vllm/{_MODELS}solar.py:SolarModel": _BETWEEN.format(
        what="an earlier block is blended in"
    ),
    f"vllm/{_MODELS}qwen3_vl.py:Qwen3LLMModel": _DEEPSTACK,
    f"vllm/{_MODELS}qwen3_vl_moe.py:Qwen3MoeLLMModel": _DEEPSTACK,
    f"vllm/{_MODELS}qwen3_omni_moe_thinker.py:Qwen3MoeLLMModel": _DEEPSTACK,
    f"vllm/{_MODELS}cohere_compass.py:CohereCompassTextModel": _DEEPSTACK,
    f"vllm/{_MODELS}granite4_vision.py:Granite4VisionLLMModel": _DEEPSTACK,
    f"vllm/{_MODELS}moss_audio.py:MossQwen3Model": _DEEPSTACK,
    f"vllm/{_MODELS}iquest_loopcoder.py:IQuestLoopCoderModel": "all layers run "
    "several times a pass: layer l of n is number r * n + l in run r, counted from 0",
    f"vllm/{_MODELS}hrm_text.py:HrmTextModel": "its two stacks run several times a "
    "pass: layer l of a stack of n is number s * n + l in step s, as the Transformers "
    "library counts; between steps the stream is normed and added to the other one's",
}
"""By model class: what it does to the stream between or around its layers."""

MODELS: Mapping[str, str] = {
    "AliceAIForCausalLM": "each layer mixes the outputs of earlier groups of layers, "
    "so there is no single stream",
    "RadioMBartPrefixForCausalLM": _PREFIX,
}
"""By architecture: why it is refused as a whole."""
