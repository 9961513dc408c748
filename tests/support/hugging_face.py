"""Tiny models of transformers and peft with random weights, as LightningModules."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.support.models import Recorder

__all__ = ["MODELS", "MORE_MODELS", "HuggingFaceModule", "gpt2", "llama"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
VOCABULARY = 61
CONTEXT = 12


def llama(**options: Any) -> nn.Module:
    """Rotary positions, grouped queries, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, **options},
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Tied embeddings, transposed weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """Encoder with the tied head of a masked language model."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def vit() -> nn.Module:
    """Encoder of image patches, with a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=5,
    )
    return ViTForImageClassification(config)


def checkpointed_llama() -> nn.Module:
    """Activation checkpointing of each layer."""
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def lora_llama() -> nn.Module:
    """Low-rank adapters on a frozen, checkpointed Llama."""
    from peft import LoraConfig, get_peft_model

    model = llama()
    model.gradient_checkpointing_enable()
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, lora_dropout=0.0, target_modules=targets, init_lora_weights=False)
    return get_peft_model(model, config)


def mixtral() -> nn.Module:
    """A sparse mixture of experts: each token uses one of eight."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=1,
        max_position_embeddings=32,
        output_router_logits=True,
    )
    return MixtralForCausalLM(config)


def t5() -> nn.Module:
    """Encoder and decoder; the first block computes a bias for all blocks."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=4,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def albert() -> nn.Module:
    """One layer, called four times."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return AlbertForMaskedLM(config)


def reentrant_llama() -> nn.Module:
    """Activation checkpointing of the older kind."""
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def prefix_llama() -> nn.Module:
    """A learned prefix, which reaches the frozen layers inside a cache of keys and values."""
    from peft import PrefixTuningConfig, TaskType, get_peft_model

    return get_peft_model(
        llama(), PrefixTuningConfig(num_virtual_tokens=3, task_type=TaskType.CAUSAL_LM)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "checkpointed llama": checkpointed_llama,
    "lora on llama": lora_llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "mixtral": mixtral,
}
MORE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "t5": t5,
    "albert": albert,
    "reentrant llama": reentrant_llama,
    "prefix of llama": prefix_llama,
    "llama in two parts": llama,  # the first part passes keys and values to the second in a cache
    "llama with hidden states": llama,
}


class HuggingFaceModule(Recorder):
    """Trains one of the models on noise: language models on tokens, the ViT on classes."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind
        self.model = {**MODELS, **MORE_MODELS}[kind]()

    def groups(self) -> Any:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        (values,) = part
        if self.kind == "vit":
            output = self.model(pixel_values=values[:, 1:].view(-1, 3, 8, 8))
            return F.cross_entropy(output.logits, values[:, 0].abs().long().clamp(max=4))
        if self.kind == "llama in two parts":
            cache = self.model(input_ids=values[:, :6], use_cache=True).past_key_values
            last = values[:, 6:]
            loss: Tensor = self.model(input_ids=last, labels=last, past_key_values=cache).loss
            return loss
        if self.kind == "llama with hidden states":
            output = self.model(input_ids=values, labels=values, output_hidden_states=True)
            means = torch.stack([hidden.square().mean() for hidden in output.hidden_states])
            return torch.add(output.loss, means.sum())
        loss = self.model(input_ids=values, labels=values).loss
        return loss

    def dataset(self, num_samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        if self.kind == "vit":
            return TensorDataset(torch.randn(num_samples, 1 + 3 * 8 * 8, generator=generator))
        ids = torch.randint(3, VOCABULARY, (num_samples, CONTEXT), generator=generator)
        return TensorDataset(ids)
