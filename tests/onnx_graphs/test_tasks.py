"""The task of a graph follows from the checkpoint's class; another task is refused unless the model can do it."""

import pytest

from ckpt_prune.onnx.tasks import GraphTask, choose_task, remove_head
from tests import encoders, families, refusals

from .exports import graphs

CLASSES = [
    ("llama", "LlamaForCausalLM", "text-generation", "text"),
    ("opt", "OPTModel", "feature-extraction", "text"),
    ("opt", "OPTForSequenceClassification", "text-classification", "text"),
    ("llama", "LlamaForTokenClassification", "token-classification", "text"),
    ("bert", "BertForMaskedLM", "fill-mask", "text"),
    ("bert", "BertForPreTraining", "fill-mask", "text"),
    ("bert", "BertForSequenceClassification", "text-classification", "text"),
    ("bert", "BertForTokenClassification", "token-classification", "text"),
    ("bert", "BertForQuestionAnswering", "question-answering", "text"),
    ("bert", "BertModel", "feature-extraction", "text"),
    ("vit", "ViTForImageClassification", "image-classification", "image"),
    ("deit", "DeiTForImageClassificationWithTeacher", "image-classification", "image"),
    ("dinov2", "Dinov2Model", "feature-extraction", "image"),
    # Outputs of this tool, and what it has no description of.
    ("llama", "PrunedLlamaForCausalLM", "text-generation", "text"),
    ("vit", "PrunedViTForImageClassification", "image-classification", "image"),
    ("gpt2", "GPT2LMHeadModel", "text-generation", "text"),
    ("distilbert", "DistilBertForMaskedLM", "fill-mask", "text"),
]


def config(model_type: str, architecture: str) -> dict[str, object]:
    return {"model_type": model_type, "architectures": [architecture]}


@pytest.mark.parametrize(("model_type", "architecture", "name", "modality"), CLASSES)
def test_the_task_of_a_class(model_type, architecture, name, modality):
    expected = GraphTask(name, modality, cached=name == "text-generation")
    assert choose_task(config(model_type, architecture)) == expected
    assert choose_task(config(model_type, architecture), task=name) == expected


def refusal(model_type: str, architecture: str, **options) -> str:
    return refusals.refusal(choose_task, config(model_type, architecture), **options)


def test_a_class_that_nothing_is_known_of():
    assert refusal("bert", "BertForNextSentencePrediction") == (
        "a model of class AutoModelForNextSentencePrediction cannot be exported: there are graphs for text-generation, "
        "fill-mask, text-classification, token-classification, question-answering, image-classification, "
        "feature-extraction, text2text-generation, automatic-speech-recognition"
    )


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("llama", "LlamaForCausalLM"), ("vit", "ViTForImageClassification"), ("bert", "BertForMaskedLM")],
)
def test_any_model_has_features_and_no_cache_of_them(model_type, architecture):
    task = choose_task(config(model_type, architecture), task="feature-extraction")
    assert (task.name, task.cached) == ("feature-extraction", False)
    assert refusal(model_type, architecture, task="feature-extraction", cache=True) == (
        "a graph for feature-extraction has no keys and values to keep: leave out --cache"
    )


def test_a_cache_is_for_generation():
    llama = config("llama", "LlamaForCausalLM")
    assert choose_task(llama, cache=True) == GraphTask("text-generation", "text", True)
    assert choose_task(llama, cache=False) == GraphTask("text-generation", "text", False)
    assert refusal("vit", "ViTForImageClassification", cache=True) == (
        "a graph for image-classification has no keys and values to keep: leave out --cache"
    )
    # Not having one is no news.
    assert not choose_task(config("vit", "ViTForImageClassification"), cache=False).cached


@pytest.mark.parametrize(
    ("variant", "base"), [("llama", "LlamaModel"), ("vit", "ViTModel"), ("bert-model", "BertModel")]
)
def test_what_does_the_task(tmp_path, variant, base):
    folder = graphs.make(tmp_path / "model", variant)
    model = families.stock(folder) if variant == "llama" else encoders.stock(folder, variant)
    task = choose_task(model.config.to_dict() | {"architectures": [type(model).__name__]})
    assert remove_head(model, task) is model
    features = remove_head(model, GraphTask("feature-extraction", task.modality, False))
    assert type(features).__name__ == base
