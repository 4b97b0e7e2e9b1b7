"""The configuration of a Meristem model for transformers: one layer for every attention pass."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

MODEL_TYPE = "meristem"


class MeristemConfig(PreTrainedConfig):
    """Sizes of a Transformer whose layers need not be alike.

    `per_layer_config` says where a layer differs in `num_attention_heads`, `num_key_value_heads`, `head_dim` or
    `intermediate_size`, which is 0 in a layer without a feed-forward: one that is followed by another pass of the same
    heads. `plan` is the structure before it was unrolled into such layers. Models that are not `is_causal` are encoders
    for classification, and read their answer from all tokens (`classifier_pooling` "mean"), the first, or the last.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    def __init__(
        self,
        vocab_size: int = 50304,
        hidden_size: int = 768,
        intermediate_size: int = 2048,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        max_position_embeddings: int = 1024,
        is_causal: bool = True,
        classifier_pooling: str = "last",
        qk_norm: bool = False,
        attention_bias: bool = False,
        attention_dropout: float = 0.0,
        rms_norm_eps: float = 1e-5,
        rope_parameters: dict[str, Any] | None = None,
        tie_word_embeddings: bool = True,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        plan: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.max_position_embeddings = max_position_embeddings
        self.is_causal = is_causal
        self.classifier_pooling = classifier_pooling
        self.qk_norm = qk_norm
        self.attention_bias = attention_bias
        self.attention_dropout = attention_dropout
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 10_000.0}
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.plan = plan
        super().__init__(
            tie_word_embeddings=tie_word_embeddings,
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            **kwargs,
        )
