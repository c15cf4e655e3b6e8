"""Programs of Lightning, accelerate and the Trainer of transformers over mpidist, and the examples."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.ranks import jobs

pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [pytest.mark.torch, pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.timeout(300)]

EXAMPLES = jobs.ROOT / "examples"


def output_of(script: str | Path, ranks: int, *arguments: str) -> str:
    # The frameworks import for seconds.
    done = jobs.run_script(script if isinstance(script, Path) else dedent(script), ranks, *arguments, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shares(output: str) -> list[float]:
    """How many percent of the images were read right, each time that it was said."""
    return [float(share) for share in re.findall(r"([\d.]+) % of the test images", output)]


def test_ddp() -> None:
    assert shares(output_of(EXAMPLES / "torch_ddp.py", 2, "--epochs", "3"))[-1] > 90


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (3, 1), (1, 3)])
def test_a_strategy_goes_on_with_another_number_of_ranks(tmp_path: Path, ranks: int, replicas: int) -> None:
    script, folder = EXAMPLES / "torch_strategy.py", str(tmp_path / "out")
    layout = ("--replicas", str(replicas), "--resume", folder)
    before = shares(output_of(script, ranks, "--epochs", "2", *layout))
    assert len(before) == 2
    after = shares(output_of(script, 3 if ranks == 1 else 1, "--epochs", "4", "--resume", folder))
    # The last steps of the second epoch come once more: every tenth is saved.
    assert after[0] == before[-1]
    assert len(after) == 3
    assert after[-1] > 90


def test_fsdp_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    before = shares(output_of(EXAMPLES / "torch_fsdp.py", 2, "--epochs", "4", "--out", folder))
    assert len(before) == 4
    after = shares(output_of(EXAMPLES / "torch_fsdp.py", 3, "--epochs", "7", "--out", folder))
    # Said first as it was loaded, and then for each epoch that was left.
    assert after[0] == before[-1]
    assert len(after) == 4
    assert after[-1] > 90


def test_lightning() -> None:
    pytest.importorskip("lightning", reason="Lightning is missing: pip install lightning")
    output = output_of(EXAMPLES / "lightning_trainer.py", 2, "--epochs", "3")
    assert "2 ranks" in output
    assert shares(output)[-1] > 90


def test_accelerate() -> None:
    pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
    program = """
    import torch
    from accelerate import Accelerator
    from torch import nn

    torch.distributed.init_process_group("mpidist")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 10))
    loader = torch.utils.data.DataLoader(data, 8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05), loader)
    for _ in range(5):
        for (given,) in loader:
            optimizer.zero_grad()
            loss = (model(given) - given.sum(1, keepdim=True)).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
    losses = accelerator.gather(loss.detach())
    backend = torch.distributed.get_backend()
    print(f"{backend} {accelerator.num_processes} {len(losses)} {losses.max().item() < 5} {len(loader)}\\n", end="")
    accelerator.end_training()
    """
    assert output_of(program, 2).splitlines() == ["mpidist 2 2 True 4"] * 2


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is missing: pip install transformers accelerate")
    pytest.importorskip("accelerate", reason="accelerate is missing: pip install transformers accelerate")
    program = """
    import sys
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.distributed.init_process_group("mpidist")
    torch.manual_seed(0)
    size = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=20)
    model = BertForSequenceClassification(BertConfig(**size, max_position_embeddings=8))
    words = torch.randint(0, 20, (128, 8))
    data = [{"input_ids": row, "labels": (row[0] > 9).long()} for row in words]
    arguments = TrainingArguments(
        sys.argv[1], use_cpu=True, num_train_epochs=20, learning_rate=1e-2, report_to=[],
        per_device_train_batch_size=16, save_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    loss = trainer.evaluate(data)["eval_loss"]
    print(f"{torch.distributed.get_backend()} {arguments.world_size} {loss < 0.3}\\n", end="", flush=True)
    """
    found = [line for line in output_of(program, 2, str(tmp_path)).splitlines() if line.startswith("mpidist")]
    assert found == ["mpidist 2 True"] * 2
