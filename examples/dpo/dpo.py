"""Direct preference optimisation (Rafailov et al., 2023) of any causal model of `transformers`, on any mesh.

A plain LightningModule: the answers that people preferred and those that they rejected go through the model in one
call. The reference is what the model said before training, in one of two ways:

- `autolaunch predict` writes the log-probabilities of the reference beside the data, on any mesh, and `data.reference`
  reads them: nothing but the policy is in memory then, and every mesh trains alike.
- `module.adapter=true` trains a LoRA of PEFT and asks the same model with its adapter off, in a second call without
  gradients. Pipelines cut the model for one call, so that these need the first way.

`python dpo.py tiny` makes a model of two layers and pairs to try all of this with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

NOT_TRAINED = -100


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """What a model gives to whole answers: the sum over their tokens.

    Args:
        logits: [n, s, vocab].
        labels: [n, s], the tokens of the answers where they stand; -100 everywhere else.

    Returns:
        [n].
    """
    targets = labels[:, 1:]
    lost = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="none")
    return -lost.view_as(targets).sum(-1)  # 0 where there is nothing to say


class DPO(L.LightningModule):
    """Prefers the chosen answers to the rejected ones, more than the reference does.

    Args:
        model: a directory with config.json and safetensors, or a name of the hub.
        beta: how much a change of the log-probabilities counts; large values keep the policy near the reference.
        lr: learning rate of AdamW.
        adapter: train a LoRA, and take the model without it as the reference.
    """

    def __init__(self, model: str, beta: float = 0.1, lr: float = 1e-6, adapter: bool = False) -> None:
        super().__init__()
        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(model)
        self.beta, self.lr, self.adapter = beta, lr, adapter
        if adapter:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(0)
            self.model = get_peft_model(self.model, LoraConfig(target_modules="all-linear"))

    def num_items_in_batch(self, batch: dict[str, Tensor]) -> Tensor:
        """Over how many pairs the loss is the mean: the strategy weighs the batches of ranks by it."""
        return torch.tensor(len(batch["input_ids"]))

    def answers(self, batch: dict[str, Tensor]) -> Tensor:
        """Log-probabilities of the chosen and the rejected answers, [pairs, 2]."""
        tokens, labels = batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1)
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return log_probabilities(logits, labels).view(-1, 2)

    def reference(self, batch: dict[str, Tensor]) -> Tensor:
        """The same of the reference: as it was written beside the data, or with the adapter off."""
        if "reference" in batch:
            return batch["reference"]
        if not self.adapter:
            raise ValueError("there is no reference: data.reference=<output_dir of predict>/predictions, or an adapter")
        peft_model: Any = self.model
        with torch.no_grad(), peft_model.disable_adapter():
            return self.answers(batch)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The mean loss over the pairs, and by how much each prefers its chosen answer, [pairs]."""
        gained = self.answers(batch) - self.reference(batch)
        margins = self.beta * (gained[:, 0] - gained[:, 1])
        return -F.logsigmoid(margins).mean(), margins

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, margins = self.losses(batch)
        self.log("margin", margins.detach().mean(), sync_dist=True, batch_size=len(margins))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, margins = self.losses(batch)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(margins))
        self.log("val_accuracy", (margins > 0).float().mean(), sync_dist=True, batch_size=len(margins))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"pair": batch["pair"], "reference": self.answers(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, weight_decay=0.0)


class _Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: Sequence[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Pairs(L.LightningDataModule):
    """Rows of a jsonl file with `prompt`, `chosen` and `rejected`.

    A batch is `input_ids` and `labels`, each [pairs, 2, seq_len] (chosen, rejected; padded at the end), `pair`
    [pairs], the row of the file, and, with a reference, `reference` [pairs, 2].

    Args:
        path: the file.
        tokenizer: a directory with a tokenizer.
        seq_len: longest prompt and answer; longer ones lose the end of the answer.
        batch_size: pairs of all ranks along dp.
        reference: the directory that `autolaunch predict` wrote to: <output_dir>/predictions.
        validation: how many rows at the end are kept for validation.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        seq_len: int = 512,
        batch_size: int = 4,
        reference: str | None = None,
        validation: int = 8,
    ) -> None:
        super().__init__()
        self.path, self.tokenizer, self.seq_len, self.batch_size = path, tokenizer, seq_len, batch_size
        self.reference, self.validation = reference, validation
        self.rows: list[dict[str, Tensor]] = []

    def setup(self, stage: str) -> None:
        if self.rows:
            return
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        said: dict[int, Tensor] = {}
        for file in sorted(Path(self.reference).glob("*.pt")) if self.reference else []:
            predicted = torch.load(file, weights_only=True)
            said.update(zip(predicted["pair"].tolist(), predicted["reference"], strict=True))
        for number, line in enumerate(Path(self.path).read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            both = [self._encoded(tokenizer, row["prompt"], row[answer]) for answer in ("chosen", "rejected")]
            tokens, labels = (torch.tensor([one[part] for one in both]) for part in (0, 1))
            self.rows.append({"input_ids": tokens, "labels": labels, "pair": torch.tensor(number)})
            if self.reference:
                if number not in said:
                    raise ValueError(f"{self.reference} says nothing of row {number} of {self.path}: predict it again")
                self.rows[-1]["reference"] = said[number]

    def _encoded(self, tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """(tokens, labels) of a prompt and an answer, each of seq_len."""
        asked = tokenizer(prompt)["input_ids"]
        answered = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        tokens = [*asked, *answered][: self.seq_len]
        labels = [*[NOT_TRAINED] * len(asked), *answered][: self.seq_len]
        rest = self.seq_len - len(tokens)
        return tokens + [tokenizer.eos_token_id] * rest, labels + [NOT_TRAINED] * rest

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        rows = self.rows[: len(self.rows) - self.validation]
        return DataLoader(_Rows(rows), batch_size=self.batch_size, drop_last=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(_Rows(self.rows[len(self.rows) - self.validation :]), batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(_Rows(self.rows), batch_size=self.batch_size)


def make_tiny(directory: Path) -> None:
    """A model of two layers with a tokenizer of characters, and pairs: sums that are right and sums that are not."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    signs = ["<end>", *"0123456789+=? "]
    characters = Tokenizer(models.WordLevel({sign: number for number, sign in enumerate(signs)}, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<end>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=16, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    for part in (AutoModelForCausalLM.from_config(config), tokenizer):
        part.save_pretrained(directory / "model")
    rows = []
    for number in range(72):
        a, b = number % 9, number // 9
        rows.append({"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1 + number % 3)})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "pairs.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python dpo.py DIRECTORY: a tiny model and pairs to try")
    make_tiny(Path(sys.argv[1]))
