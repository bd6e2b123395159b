"""Every command of a guide runs, on tiny models: names of files are those that the guides speak of.

So do the commands on the front page, which print what is shown below them.
"""

import random
import re
import shlex
import shutil
from pathlib import Path

import pytest

from ckpt_prune.common.graph_types import GRAPH_FILES
from tests.benchmarking.forking import fork_what_has_imported
from tests.cli.conftest import WORDS
from tests.cli.running import ok
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.gguf_files.tiny import save
from tests.graphs import traced_before, with_layers
from tests.images import CLASSES, write_csv, write_images, write_vit
from tests.pairs import choose_cases
from tests.stages.vocabulary.tokenizers_of_tests import byte_level, page, save_llama
from tests.talks import WINDOW, write_rows, write_talker

FRONT_PAGE = Path(__file__).parents[1] / "README.md"
GUIDES = sorted((Path(__file__).parents[1] / "recipes" / "guides").glob("*.md"))
DEAR = ("onnx", "llama-cpp")
"""Guides whose commands trace graphs and start runtimes for seconds: with `--thorough`."""
SMALLER = {"--window": "16", "--generate": "2", "--layers": "0:1"}
"""The tiny models read short texts, and have two blocks."""


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
    write_things()


def write_things() -> None:
    """Write a language model, a vision model and their data into the working folder."""
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
@pytest.mark.parametrize(
    "guide", choose_cases(GUIDES, lambda guide: guide.stem not in DEAR), ids=lambda guide: guide.stem
)
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
    if guide.stem == "vision":  # an image takes more tokens than a word
        write_talker(Path("VLM"), "llava")
        write_rows(Path())
        monkeypatch.setitem(SMALLER, "--window", str(WINDOW))
    if guide.stem == "vocabulary":  # tokens that are whole words split into none
        shutil.rmtree("MODEL")
        save_llama(Path("MODEL"), byte_level())
        for name in ("calib.txt", "held_out.txt"):
            Path(name).write_text(page(), encoding="utf-8")
    for words in written:
        if "--onnx" in words:  # which would trace both models anew
            shutil.copytree("graphs", "traced", ignore=shutil.ignore_patterns(GRAPH_FILES["int8"]))
            traced_before(monkeypatch, Path("traced"))
        ok(*smaller(words))


def samples(page: Path) -> list[tuple[list[str], list[str]]]:
    """The commands of a page's samples of a terminal, each with the lines that it shows below."""
    (block,) = re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    runs = re.split(r"^\$ ckpt-prune ", block, flags=re.MULTILINE)
    assert runs[0] == ""
    return [
        (shlex.split(command, comments=True), shown)
        for command, *shown in (run.rstrip("\n").split("\n") for run in runs[1:])
    ]


def without_figures(line: str) -> str:
    """A line without what differs from model to model: numbers, their units and the width of columns."""
    line = re.sub(r"\d[\d.,]*( to \d+)?([KMB]|( [KM]?B))?\b", "#", line)
    return " ".join(line.split())


@pytest.mark.usefixtures("workplace")
def test_commands_on_the_front_page_print_what_is_shown_below_them():
    with_layers(Path("MODEL"), 1, of=2)  # a graph of one block is traced in half of the time
    shown_at_all = 0
    for words, shown in samples(FRONT_PAGE):
        more = ["--window", "16", "--samples", "8"] if words[0] == "prune" else []
        printed = iter([without_figures(line) for line in ok(*smaller(words), *more).splitlines()])
        for line in map(without_figures, shown):
            assert line in printed, line  # in the order that they are printed in
        shown_at_all += len(shown)
    assert shown_at_all >= 8


def test_a_sample_that_is_not_printed_is_noticed():
    line = without_figures("kept per block: heads 8/8, mlp 403/544 (the size of ratio 0.2)")
    assert line == without_figures("kept per block: heads 1 to 2/2, mlp 20/24 (the size of ratio 0.25)")
    assert line != without_figures("kept per block: heads 8/8, mlp 403/544 (ratio 0.2)")
    assert without_figures("parameters    3.16M  2.67M  84.6%") == without_figures("parameters  13.1K  9.5K  72%")


@pytest.mark.usefixtures("workplace")
def test_the_other_commands_of_the_front_page_run():
    """Those for the reader's own model; what installs, and what made the results, is left out."""
    text = FRONT_PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("ckpt-prune prune MODEL")]
    assert any("--target-params 70%" in line for line in lines)
    for line in lines:
        ok(*smaller(shlex.split(line, comments=True)[1:]), "--window", "16", "--samples", "8")
