# SPDX-License-Identifier: Apache-2.0
"""Trains the demo model from scratch: tokenizer, Llama-shaped model, model card.

    python examples/demo_model/train.py

Takes about a quarter of an hour on two idle CPU cores; writes
`examples/demo_model/weights/`. Needs torch, transformers, tokenizers and safetensors,
but no data and no network.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from batching import Batch, batches
from generate_text import documents, neutral_openings
from model_card import Measured, Sample, write_model_card
from text_tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

WEIGHTS = Path(__file__).parent / "weights"
VALIDATION_SEED = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a training run; the defaults produced the committed weights."""

    out: Path = WEIGHTS
    steps: int = 2200
    batch_tokens: int = 2560
    """Most tokens per step, padding included."""
    length: int = 512
    """Most tokens per document, and the model's context length."""
    learning_rate: float = 3e-3
    hidden_size: int = 192
    layers: int = 6
    vocab_size: int = 1280
    tokenizer_documents: int = 20_000
    seed: int = 0
    threads: int = 2


def build_model(settings: Settings, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Create a randomly initialised Llama with heads of 32, two of them for keys."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.hidden_size * 5 // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // 32,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=settings.length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id("<|bos|>"),
        eos_token_id=tokenizer.token_to_id("<|eos|>"),
        pad_token_id=tokenizer.token_to_id("<|pad|>"),
    )
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy in nats per token, computed in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        # Causal attention needs no mask for padding on the right.
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())


def rate_at(step: int, settings: Settings) -> float:
    """The learning rate: a linear warm-up, then a cosine down to a twentieth."""
    warm_up = max(1, settings.steps // 20)
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, settings.steps - warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * (0.05 + 0.95 * cosine)


def make_optimizer(model: LlamaForCausalLM, settings: Settings) -> torch.optim.AdamW:
    """AdamW that decays matrices but not norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))


def fit(model: LlamaForCausalLM, tokenizer: Tokenizer, settings: Settings) -> float:
    """Train in place, print the progress, and return the last step's loss."""
    optimizer = make_optimizer(model, settings)
    stream = batches(
        tokenizer, settings.batch_tokens, settings.length, settings.seed + 1
    )
    loss = torch.tensor(math.nan)
    for step, batch in enumerate(islice(stream, settings.steps), start=1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step - 1, settings)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == settings.steps:
            cpu = time.process_time()
            print(
                f"step {step:5d}  loss {loss.item():.3f}  {cpu:5.0f} CPU s", flush=True
            )
        if step % 300 == 0:
            sample = continue_text(model, tokenizer, neutral_openings(1, step)[0])
            print(f"  {sample.prompt} ||{sample.written}", flush=True)
    return loss.item()


@torch.no_grad()
def validate(
    model: LlamaForCausalLM, tokenizer: Tokenizer, settings: Settings
) -> float:
    """Loss on text of another seed, in nats per token."""
    stream = batches(tokenizer, settings.batch_tokens, settings.length, VALIDATION_SEED)
    losses = [loss_of(model, batch).item() for batch in islice(stream, 24)]
    return sum(losses) / len(losses)


@torch.no_grad()
def continue_text(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, temperature: float = 0.0
) -> Sample:
    """The continuation of a prompt, up to 120 tokens; greedy at temperature 0."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0}
    chosen = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=120,
        **(drawn if temperature else {"do_sample": False}),
    )
    written = tokenizer.decode(chosen[0, ids.shape[1] :].tolist())
    return Sample(prompt=prompt, written=written)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, settings: Settings) -> None:
    """Write weights in bfloat16, configuration and tokenizer."""
    settings.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.save_pretrained(settings.out)
    # save_pretrained makes the file readable by its owner only.
    (settings.out / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, settings.out, settings.length)


def train(settings: Settings) -> Measured:
    """Run the whole training; returns the figures of the model card."""
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    count = settings.tokenizer_documents
    texts = (document.text for document in islice(documents(settings.seed), count))
    tokenizer = train_tokenizer(texts, settings.vocab_size)
    model = build_model(settings, tokenizer)
    train_loss = fit(model, tokenizer, settings)
    save(model, tokenizer, settings)
    prompts = neutral_openings(8, settings.seed)
    measured = Measured(
        parameters=model.num_parameters(),
        train_loss=train_loss,
        validation_loss=validate(model, tokenizer, settings),
        greedy=tuple(continue_text(model, tokenizer, p) for p in prompts[:4]),
        sampled=tuple(continue_text(model, tokenizer, p, 0.8) for p in prompts[4:]),
    )
    recipe = {k: v for k, v in asdict(settings).items() if k != "out"}
    write_model_card(settings.out, recipe, measured)
    return measured


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: every field of `Settings` is an option."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    for name, default in asdict(Settings()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default)
    measured = train(Settings(**vars(parser.parse_args(argv))))
    print(f"validation loss {measured.validation_loss:.3f} nats per token")


if __name__ == "__main__":
    main()
