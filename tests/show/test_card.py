"""The model card: metadata, how the output is loaded, and what was done to it."""

from typing import Any

import pytest

from ckpt_prune.runner.publish import model_card
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.report import Report
from tests.show.examples import Json, elsewhere, layer, report, site

SHIPPED = "That is the shipped recipe of this name"
CHANGED = f"{SHIPPED} with changes; ckpt_prune.json has it as it was used."
CARD = """---
library_name: transformers
base_model: org/tiny
base_model_relation: finetune
license: mit
language: [en]
pipeline_tag: text-generation
tags: [ckpt-prune, pruned]
---

# org/tiny, pruned by recipe corp

Made by ckpt_prune 0.1.0 from `org/tiny`.

## Size

|  | before | after | share |
|---|---:|---:|---:|
| parameters | 2.00M | 1.50M | 75.0% |
| bytes | 8.39 MB | 6.29 MB | 75.0% |
| FLOPs / 1024 tokens | 4.00B | 3.00B | 75.0% |

What it costs in quality was not measured. ckpt-prune evaluate OUT --against MODEL measures it, and notes it here.

## How to load it

Replace PATH by this folder, or by its id on the Hub.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH")
```

## Recipe

Affine. That is the shipped recipe of this name with changes; ckpt_prune.json has it as it was used.

## Units

| space | units kept | error before | after | held out |
|---|---:|---:|---:|---:|
| mlp (columns of the MLP) | 4 of 8 | 0.5000 | 0.2500 | 0.3000 |

- The error is the share of the energy of a module's output that pruning changes, before and after compensation: mean \
over blocks, calibration samples.
- It is not perplexity or accuracy.
- Compensation lowers the error on calibration samples at 1 of 1 sites.
- Compensation lowers the error on held-out samples at 1 of 1 sites.

## How it was made

|  |  |
|---|---|
| dense model | org/tiny |
| its fingerprint | f00d |
| recipe | corp |
| method from | CORP, eq. 7 |
| digest of the recipe | beef |
| calibration | target dense, statistics cafe, 128 samples, window 16, 2,048 tokens, 1 fold |
| stored as | llama |
| written by | ckpt_prune 0.1.0, torch 2.13.0, transformers 5.23.0 |

`ckpt_prune.json` has these figures for every block. `ckpt-prune report PATH` draws them as one page.
"""


def card(json_report: Json, **container: Any) -> str:
    stored = {"model_type": "llama", "auto_class": "AutoModelForCausalLM"} | container
    return model_card(Report.read(json_report | {"container": stored}))


def test_a_card():
    source = {"name": "org/tiny", "fingerprint": "f00d", "card": {"license": "mit", "language": ["en"]}}
    assert card(report([site(0)], source=source)) == CARD


@pytest.mark.parametrize(("older", "mentioned"), [({"rope_theta": 500.0}, True), ({}, False)])
def test_the_card_says_what_older_versions_of_transformers_read(older, mentioned):
    config = {"model_type": "llama", "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, **older}
    container = {"model_type": "llama", "auto_class": "AutoModelForCausalLM"}
    text = model_card(Report.read(report([site(0)]) | {"container": container}), config)
    assert ("transformers 4.57 reads the same rotary positions" in text) == mentioned


def test_remote_code_is_loaded_with_this_package_or_with_trust():
    text = card(report([site(0)]), remote_code=True, note="no slot", sentence_class="CrossEncoder")
    assert "its id on the Hub. `from_pretrained` of every other class refuses it. " in text
    assert "Its code needs transformers 5.19 or later.\n" in text
    assert "| stored as | remote code: no slot |" in text
    assert (
        '```python\nimport ckpt_prune  # without running the code in the folder\n\nmodel = ckpt_prune.load("PATH")\n\n'
        "from transformers import AutoModelForCausalLM  # without ckpt_prune\n\n"
        'model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)\n\n'
        "from sentence_transformers import CrossEncoder  # for scores of pairs of texts\n\n"
        'model = CrossEncoder("PATH", trust_remote_code=True)\n```'
    ) in text
    assert "library_name: sentence-transformers\npipeline_tag: text-ranking\n" in text


def test_what_another_tool_pruned_has_no_recipe():
    text = card(elsewhere([layer(0)], recipe={"name": "pruned elsewhere"}))
    assert "# tiny, pruned elsewhere and recovered\n" in text
    assert "## Recipe" not in text


# ---- how a recipe differs from the shipped one -------------------------------------------------------------------


def magnitude(*changes: str, **amount):
    return load_recipe("magnitude", changes, **amount)


def test_a_strength_that_was_searched_for_is_no_change():
    used = load_recipe("ridge-perplexity").with_strength(10.0)
    search = {"chosen": 10.0, "perplexity": {"10": 3.0}}
    json_report = report([site(0)]) | {
        "recipe": used.model_dump(mode="json", by_alias=True),
        "recipe_digest": used.digest,
    }
    assert SHIPPED not in card(json_report | {"lambda_search": search})
    assert CHANGED in card(json_report)
