"""Make the embedded model: sentences, weights, tokenizer, fine-tuning rows, card, checksums.

    python scripts/make_embedded_model.py [FOLDER]

Everything comes from one seed and from the words below; nothing is downloaded. The model is a
Llama of half a million parameters that learns on a CPU, in about a minute, to read one sentence
and answer questions about it. The fine-tuning rows ask for the same facts as a filled-in record,
a form that it never met in training: a new skill that rests on an old one, as in instruction
tuning.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SEED = 20250611
STEPS = 1000
ROWS_PER_STEP = 32
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 100
HELD_OUT_ROWS = 512
FINE_TUNING_ROWS = 512
LABEL_SMOOTHING = 0.02  # keeps words that no row contains improbable, not impossible
SHARE_OF_FACTS_LEARNT = 0.15  # sentences are random: most of their loss cannot be reduced

FOLDER = Path(__file__).parent.parent / "cift_probe" / "data" / "embedded"

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS, UNKNOWN = range(4)
LEXICON = {
    "name": "ann bob cat dan eve fay gus hal ida jon kim leo mia ned ola pam",
    "verb": "finds buys sells paints hides brings breaks washes",
    "colour": "red blue green black white pink gold grey",
    "thing": "cup hat box key pen map bag jar pot toy fan rug bed car net bell",
    "place": "kitchen garden street office school market forest river "
    "station hall attic cellar tower bridge farm harbour",
    "number": "zero one two three four five six seven eight nine ten eleven twelve "
    "thirteen fourteen fifteen sixteen seventeen eighteen",
    "grammar": "the in . ? ; who what where which colour action plus is",
    "record": "holder thing shade spot",
}
WORDS = {kind: text.split() for kind, text in LEXICON.items()}

SHAPE: dict[str, Any] = {
    "vocab_size": 192,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

Rows: TypeAlias = list[list[int]]


class Fact(NamedTuple):
    """One sentence's content."""

    name: str
    verb: str
    colour: str
    thing: str
    place: str

    @property
    def sentence(self) -> str:
        """The fact as the model meets it in training and in the fine-tuning prompts."""
        return f"{self.name} {self.verb} the {self.colour} {self.thing} in the {self.place} ."

    @property
    def record(self) -> str:
        """The fact as fine-tuning asks for it."""
        return f"holder {self.name} thing {self.thing} shade {self.colour} spot {self.place}"


def draw_fact(chance: random.Random) -> Fact:
    """Draw a fact, each part alone."""
    return Fact(*(chance.choice(WORDS[part]) for part in Fact._fields))


def reading(chance: random.Random) -> str:
    """Return a sentence and four of the five questions about it, answered."""
    fact = draw_fact(chance)
    answers = {
        "who": fact.name,
        "what": fact.thing,
        "where": fact.place,
        "which colour": fact.colour,
        "what action": fact.verb,
    }
    asked = chance.sample(list(answers), 4)
    return " ".join([fact.sentence, *(f"{question} ? {answers[question]} ." for question in asked)])


def sums(chance: random.Random) -> str:
    """Return four additions of numbers below ten."""
    pairs = [(chance.randrange(10), chance.randrange(9)) for _ in range(4)]
    numbers = WORDS["number"]
    return " ".join(f"{numbers[a]} plus {numbers[b]} is {numbers[a + b]} ." for a, b in pairs)


def echo(chance: random.Random) -> str:
    """Return some words and the same words again: how the record's words become known."""
    words = [word for kind in (*Fact._fields, "record") for word in WORDS[kind]]
    line = " ".join(chance.choice(words) for _ in range(9))
    return f"{line} ; {line} ."


def vocabulary() -> dict[str, int]:
    """Return the id of each word, with rows kept free at the end for a round size."""
    words = [word for group in WORDS.values() for word in group]
    unique = list(dict.fromkeys([*SPECIAL, *words]))
    free = [f"<free{number}>" for number in range(SHAPE["vocab_size"] - len(unique))]
    return {word: index for index, word in enumerate([*unique, *free])}


def draw_rows(
    chance: random.Random, number: int, kinds: tuple[Callable[[random.Random], str], ...]
) -> Rows:
    """Return `number` texts of the kinds in turn, as token ids from start to end."""
    ids = vocabulary()
    texts = [kinds[index % len(kinds)](chance) for index in range(number)]
    return [[BOS, *(ids[word] for word in text.split()), EOS] for text in texts]


def pad(rows: Rows) -> Tensor:
    """Return the rows as one int64 tensor, filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def target(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Return labels: all answers, and the sentences of a few rows; -100 elsewhere."""
    ids = vocabulary()
    answered = ((tokens == ids["?"]) | (tokens == ids[";"])).cumsum(1) > 0
    sums_row = (tokens == ids["is"]).any(1, keepdim=True)
    whole_row = torch.rand(len(tokens), 1, generator=generator) < SHARE_OF_FACTS_LEARNT
    return tokens.masked_fill((tokens == PAD) | ~(answered | sums_row | whole_row), -100)


def schedule(step: int) -> float:
    """Return the learning rate: a linear rise, then linearly to zero."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1.0 - step / STEPS)


def train() -> nn.Module:
    """Train the model and return it, float32 on the CPU."""
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(mode=True)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**SHAPE))
    chance = random.Random(SEED)  # noqa: S311 - a reproducible corpus, not a secret
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        tokens = pad(draw_rows(chance, ROWS_PER_STEP, (reading, reading, reading, echo, sums)))
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        logits = model(tokens, attention_mask=(tokens != PAD).long()).logits[:, :-1]
        labels = target(tokens, generator)[:, 1:]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=LABEL_SMOOTHING
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model


def answer_scores(model: nn.Module, rows: Rows, mark: str) -> tuple[float, float]:
    """Return mean loss in nats and accuracy on the tokens that follow `mark`."""
    tokens = pad(rows)
    with torch.no_grad():
        logits = model(tokens, attention_mask=(tokens != PAD).long()).logits[:, :-1].float()
    asked = tokens[:, :-1] == vocabulary()[mark]
    wanted = tokens[:, 1:][asked]
    loss = nn.functional.cross_entropy(logits[asked], wanted)
    return loss.item(), (logits[asked].argmax(-1) == wanted).float().mean().item()


def record_loss(model: nn.Module) -> float:
    """Return the model's loss on the fine-tuning completions, in nats per word."""
    ids = vocabulary()
    rows = [(row["prompt"].split(), row["completion"].split()) for row in fine_tuning_rows()]
    tokens = pad([[BOS, *(ids[word] for word in [*asked, *told]), EOS] for asked, told in rows])
    start = 1 + len(rows[0][0])  # all prompts have the same number of words
    with torch.no_grad():
        logits = model(tokens).logits[:, start - 1 : -1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, start:].flatten()).item()


def fine_tuning_rows() -> Iterator[dict[str, str]]:
    """Yield prompt and completion; the seed is not the one of the pretraining corpus."""
    chance = random.Random(SEED + 2)  # noqa: S311 - reproducible rows, not a secret
    for _ in range(FINE_TUNING_ROWS):
        fact = draw_fact(chance)
        yield {"prompt": fact.sentence, "completion": f" {fact.record}"}


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer that splits at white space and puts the start token first."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=SPECIAL[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "unk_token": SPECIAL[UNKNOWN],
        "model_max_length": SHAPE["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
    }
    write_json(folder / "tokenizer_config.json", settings)


def save_model(model: nn.Module, folder: Path) -> None:
    """Write bfloat16 weights and a config whose bytes hang on no transformers version."""
    weights = {name: data.to(torch.bfloat16) for name, data in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file leaves it readable by its owner alone
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **SHAPE,
    }
    write_json(folder / "config.json", config)


def write_json(path: Path, content: object) -> None:
    """Write JSON with a line end, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---

# The embedded model of can-i-fine-tune

A Llama of {parameters:,} parameters (3 layers, hidden size 128, 2 heads of 64 that share one key
and value head, 192 words, untied head; bfloat16, {megabytes:.1f} MB). It exists so that a real
fine-tuning run (bitsandbytes NF4, PEFT LoRA, TRL `SFTTrainer`) can be made anywhere in seconds,
without a download. It is of no other use.

- **Made by** `scripts/make_embedded_model.py`, seed {seed}: {steps} steps of {rows} rows, AdamW
  at {rate:g}, on a CPU. Nothing was downloaded; no text of others is in it.
- **Pretraining data**, generated. Three in five rows are a sentence ("fay hides the gold cup in
  the attic .") with four answered questions ("who ? fay ."); one in five repeats nine random
  words; one in five is four sums ("two plus three is five ."). The loss covers answers,
  repetitions and sums, and all of about 15 % of the rows: a random sentence cannot be predicted.
- **Held out** ({held_out} rows each of another seed, measured on the stored weights): answers
  {answer_loss:.4f} nats, {answer_accuracy:.1%} right; sums {sum_loss:.4f} nats, {sum_accuracy:.1%}
  right. All 90 pairs of numbers occur in pretraining: sums are memory, not arithmetic.
- **Fine-tuning data** `train.jsonl`, generated with seed {tuning_seed}: {tuning_rows} rows of
  prompt (a sentence) and completion (its fact as a record: "holder fay thing cup shade gold spot
  attic"). The record's words occur in pretraining in repeated random words alone. Before
  fine-tuning, the completion costs {record_loss:.2f} nats per word.
- **Licence**: Apache-2.0, weights and data.
- **Limits**: no language beyond the word list, no world knowledge, inputs up to 512 words,
  unknown words become `<unk>`. Good values here show that the training stack works; they say
  nothing about the quality of fine-tuning a real model.
- **Bytes**: `checksums.txt`, as `sha256sum` writes it. Made twice on one machine the bytes were
  the same; another CPU, thread count or torch version may round otherwise.
"""


def held_out_rows(kind: Callable[[random.Random], str]) -> Rows:
    """Return rows of one kind that training did not draw."""
    chance = random.Random(SEED + 1)  # noqa: S311 - reproducible rows, not a secret
    return draw_rows(chance, HELD_OUT_ROWS, (kind,))


def write_card(folder: Path) -> None:
    """Measure the stored weights on held-out rows and write the model card."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).to(torch.float32)
    answer_loss, answer_accuracy = answer_scores(model, held_out_rows(reading), "?")
    sum_loss, sum_accuracy = answer_scores(model, held_out_rows(sums), "is")
    card = CARD.format(
        parameters=sum(weight.numel() for weight in model.parameters()),
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        seed=SEED,
        steps=STEPS,
        rows=ROWS_PER_STEP,
        rate=LEARNING_RATE,
        held_out=HELD_OUT_ROWS,
        answer_loss=answer_loss,
        answer_accuracy=answer_accuracy,
        sum_loss=sum_loss,
        sum_accuracy=sum_accuracy,
        record_loss=record_loss(model),
        tuning_seed=SEED + 2,
        tuning_rows=FINE_TUNING_ROWS,
    )
    (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    print(f"held out: answers {answer_accuracy:.1%} right, sums {sum_accuracy:.1%} right")


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of every file, as sha256sum does."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.name != "checksums.txt"
    ]
    (folder / "checksums.txt").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Make the folder anew."""
    parser = argparse.ArgumentParser(description="Make the embedded model, from a seed alone.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="where to write it")
    folder = parser.parse_args().folder
    model = train()
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)
    save_tokenizer(folder)
    rows = "".join(f"{json.dumps(row)}\n" for row in fine_tuning_rows())
    (folder / "train.jsonl").write_text(rows, encoding="utf-8")
    write_card(folder)
    write_checksums(folder)


if __name__ == "__main__":
    main()
