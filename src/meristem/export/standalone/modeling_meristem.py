"""Meristem models for transformers: Transformers whose layers need not be alike.

One layer for every attention pass. A layer that is followed by another pass of the same heads has no feed-forward.
Pre-norm RMSNorm, rotary positions over each layer's own head dim, SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_meristem import MeristemConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (B or 1, T, head dim) each


class MeristemRMSNorm(nn.Module):
    """Root mean square norm with a gain, over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(hidden_states.dtype)


class MeristemRotaryEmbedding(nn.Module):
    """Rotary positions for heads of one dim; `config` is that of a layer with such heads."""

    attention_scaling: float
    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: MeristemConfig) -> None:
        super().__init__()
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        default = self.rope_type == "default"
        init = self.compute_default_rope_parameters if default else ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: MeristemConfig, *args: Any, **kwargs: Any) -> tuple[Tensor, float]:
        dim, base = config.head_dim, config.rope_parameters["rope_theta"]
        return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float32)
        angles = torch.cat((angles, angles), dim=-1)
        scale = self.attention_scaling
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys (B, heads, T, head dim), turned by their positions; coordinate i goes with i + dim / 2."""
    cos, sin = rotation[0].unsqueeze(1), rotation[1].unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def eager_attention_forward(
    module: MeristemAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out, which can return its weights."""
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class MeristemAttention(nn.Module):
    """Self-attention of one layer. It keeps the configuration of all, because a layer's own is a copy."""

    def __init__(self, config: MeristemConfig, layer_idx: int) -> None:
        super().__init__()
        own = config.per_layer_config[layer_idx]
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = own.head_dim
        self.num_key_value_groups = own.num_attention_heads // own.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = config.is_causal
        queries, keys = own.num_attention_heads * own.head_dim, own.num_key_value_heads * own.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = MeristemRMSNorm(own.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = MeristemRMSNorm(own.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        rotations: dict[int, Rotation],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = rotated(query, rotations[self.head_dim]), rotated(key, rotations[self.head_dim])
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention_interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


class MeristemMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MeristemDecoderLayer(GradientCheckpointingLayer):
    """One attention pass, and a feed-forward unless another pass of the same heads follows."""

    def __init__(self, config: MeristemConfig, layer_idx: int) -> None:
        super().__init__()
        hidden = config.per_layer_config[layer_idx].intermediate_size
        self.input_layernorm = MeristemRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MeristemAttention(config, layer_idx)
        self.has_feed_forward = hidden > 0
        if self.has_feed_forward:
            self.post_attention_layernorm = MeristemRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.mlp = MeristemMLP(config.hidden_size, hidden)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        if self.has_feed_forward:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class MeristemPreTrainedModel(PreTrainedModel):
    config: MeristemConfig
    config_class = MeristemConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MeristemDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": MeristemDecoderLayer, "attentions": MeristemAttention}  # noqa: RUF012


class MeristemModel(MeristemPreTrainedModel):
    """Embedding, layers and last norm."""

    def __init__(self, config: MeristemConfig) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MeristemDecoderLayer(config, index) for index in layers)
        self.norm = MeristemRMSNorm(config.hidden_size, config.rms_norm_eps)
        own = {config.per_layer_config[index].head_dim: config.per_layer_config[index] for index in layers}
        self.rotary_embs = nn.ModuleDict({str(dim): MeristemRotaryEmbedding(own[dim]) for dim in sorted(own)})
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None and self.config.is_causal:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen)[None]
        if self.config.is_causal:
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        else:
            mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
            )
        rotations = {int(dim): rotary(inputs_embeds, position_ids) for dim, rotary in self.rotary_embs.items()}
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                rotations=rotations,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class MeristemForCausalLM(MeristemPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MeristemConfig) -> None:
        super().__init__(config)
        self.model = MeristemModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class MeristemForSequenceClassification(MeristemPreTrainedModel):
    """The classifier: one score for each class, of the mean of all real tokens, of the first or of the last one."""

    def __init__(self, config: MeristemConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MeristemModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = (input_ids != self.config.pad_token_id).long()
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        real = torch.ones_like(hidden[..., 0], dtype=torch.long) if attention_mask is None else attention_mask.long()
        logits = self.score((hidden * self._shares(real).to(hidden.dtype)[..., None]).sum(1))
        loss = None if labels is None else self._loss(logits, labels, kwargs.get("num_items_in_batch"))
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _shares(self, real: Tensor) -> Tensor:
        """How much each token counts, (B, T), where `real` is 1 for tokens and 0 for padding."""
        pooling = self.config.classifier_pooling
        if pooling == "mean":
            return real / real.sum(1, keepdim=True)
        places = torch.arange(real.shape[1], device=real.device)
        chosen = real.argmax(1) if pooling == "first" else (real * (places + 1)).argmax(1)
        return places == chosen[:, None]

    def _loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """What the configuration's `problem_type` asks for, or else what the labels look like, as a mean over labels.

        A Trainer that accumulates gradients says how many labels all micro-batches have; each gives its share then.
        """
        kind = self.config.problem_type
        if kind == "regression" or (kind is None and self.num_labels == 1):
            loss = functional.mse_loss(logits.squeeze(-1), labels.squeeze(-1).to(logits.dtype))
        elif kind == "multi_label_classification" or (kind is None and labels.is_floating_point()):
            loss = functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        else:
            loss = functional.cross_entropy(logits, labels.view(-1))
        return loss if num_items_in_batch is None else loss * ((labels != -100).sum() / num_items_in_batch)


# A Trainer that smooths labels moves them by one only for models it finds here, and lets others copy their inputs.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MeristemConfig.model_type] = MeristemForCausalLM.__name__

__all__ = [
    "MeristemForCausalLM",
    "MeristemForSequenceClassification",
    "MeristemModel",
    "MeristemPreTrainedModel",
]
