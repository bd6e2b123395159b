"""The page of the papers' rows names recipes and tests that exist."""

from tools import papers

PAGE = papers.PAGE.read_text(encoding="utf-8")


def test_what_the_page_names_is_there():
    """`python tools/papers.py` prints the same."""
    assert papers.find_faults(PAGE) == []
    assert len(papers.read_rows(PAGE)) == 104


def test_what_is_gone_is_named():
    of_a_recipe = PAGE.replace("`corp-qk`", "`corp-kq`")
    assert papers.find_faults(of_a_recipe)[0] == (
        "CORP, compensation of logits, summed over samples: the row names corp-kq, which is gone"
    )
    assert not papers.is_there("compensation/test_logit.py::equals_the_dense")
    assert not papers.is_there("compensation/test_logits.py::equals_the_dense_solve")


def test_numbers_states_and_reasons_are_kept():
    row = papers.Row("LaCo", "4.1", "tasks", "nearly", (), "–")
    assert [fault.split(",")[0] for fault in row.faults] == ["has the state 'nearly'", "is nearly"]
    assert papers.Row("LaCo", "4.1", "tasks", "exact", (), "–").faults == ["is exact, and names nothing that shows it"]
    fewer = PAGE.replace("| different |", "| exact |", 1)
    assert papers.find_faults(fewer)[-1] == f"the page does not say: {papers.count(papers.read_rows(fewer))}"
