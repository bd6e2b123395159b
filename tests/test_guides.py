"""Every command of a guide runs, on tiny models: names of files are those that the guides speak of."""

import random
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.benchmarking.forking import fork_what_has_imported
from tests.cli.conftest import WORDS
from tests.cli.running import ok
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.gguf_files.tiny import save
from tests.graphs import with_layers
from tests.images import CLASSES, write_csv, write_images, write_vit

GUIDES = sorted((Path(__file__).parents[1] / "recipes" / "guides").glob("*.md"))
SMALLER = {"--window": "16", "--generate": "2"}
"""The tiny models read short texts."""


def commands(guide: Path) -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", guide.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert all(line.startswith("ckpt-prune ") for line in lines)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def smaller(words: list[str]) -> list[str]:
    """The same command on short texts, and few of them."""
    pairs = zip(["", *words], words, strict=False)
    return [
        str(min(8, max(1, int(word) // 4))) if before == "--samples" else SMALLER.get(before, word)
        for before, word in pairs
    ]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    for name in ("calib.txt", "held_out.txt"):
        Path(name).write_text(" ".join(rng.choice(WORDS) for _ in range(400)))
    tiny_llama(max_position_embeddings=32).save_pretrained("MODEL")
    tiny_tokenizer("<s> $A").save_pretrained("MODEL")
    write_vit(Path("VIT"))
    names = [f"{number}.png" for number in range(16)]
    write_images(Path("photos"), names)
    write_csv(
        Path("photos/labels.csv"),
        "file,label",
        *(f"{name},{CLASSES[i % len(CLASSES)]}" for i, name in enumerate(names)),
    )


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_command_of_a_guide_runs(guide, monkeypatch):
    written = commands(guide)
    assert written
    if guide.stem == "onnx":  # a graph of one block is traced in half of the time
        fork_what_has_imported(monkeypatch)
        with_layers(Path("MODEL"), 1, of=2)
    if guide.stem == "llama-cpp":  # which has no tokenizer of whole words
        pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
        shutil.rmtree("MODEL")
        save(Path("MODEL"), "llama", tie_word_embeddings=True)
    for words in written:
        ok(*smaller(words))
