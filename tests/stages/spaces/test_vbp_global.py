"""VBP's one list of all blocks' columns, against variances that hooks see on the whole model."""

from pathlib import Path

import pytest

from tests.cli.running import TEXT, ok, read_json
from tests.stages.spaces.dense_inputs import copy_dense, read_dense


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy_dense(made, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_columns_of_least_variance_in_the_whole_model_go(here):
    ok("prune", "dense", "--recipe", "vbp-global", "--ratio", "0.5", *TEXT, "--evaluate-samples", "0", "-o", "out")
    _, seen = read_dense()
    variances = {block: x.var(0, correction=0).tolist() for block, x in seen.items()}
    ranked = sorted(((v, b, j) for b, own in variances.items() for j, v in enumerate(own)), reverse=True)
    kept = ranked[: len(ranked) // 2]
    sites = {site["block"]: site["kept"] for site in read_json("out/ckpt_prune.json")["sites"]}
    assert sites == {block: sorted(j for _, b, j in kept if b == block) for block in variances}
    assert len({len(own) for own in sites.values()}) == 2
