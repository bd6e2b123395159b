import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor, ViTImageProcessorPil
from transformers.models.auto import image_processing_auto
from transformers.utils import is_torchvision_available

from ckpt_prune.measure.samples.image_files import ImageFiles, choose_images, find_all_images, find_images
from ckpt_prune.measure.samples.image_processor import image_settings, load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from tests.images import ID2LABEL, MEAN, PROCESSOR, SIZE, STD, write_csv, write_image, write_images, write_processor
from tests.refusals import refusal


def find_names_and_labels(directory, split="eval", id2label=ID2LABEL, **options) -> list[tuple[str, int]]:
    files = find_images(directory, split=split, id2label=id2label, **options)
    return list(zip((path.name for path in files.paths), files.labels, strict=True))


def preprocess(path) -> np.ndarray:
    """The arithmetic of the processor in tests/images.py, in float64: (channels, height, width)."""
    with Image.open(path) as image:
        resized = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return ((np.asarray(resized, dtype=np.float64) / 255 - MEAN) / STD).transpose(2, 0, 1)


class TestLoadProcessor:
    def test_always_the_pillow_one(self, tmp_path, monkeypatch):
        write_processor(tmp_path)
        chosen = []
        load = image_processing_auto._load_backend_class
        monkeypatch.setattr(
            image_processing_auto,
            "_load_backend_class",
            lambda name, backend, *args: chosen.append(backend) or load(name, backend, *args),
        )
        # As where torchvision is installed, which transformers' own choice then falls on.
        monkeypatch.setattr(image_processing_auto, "is_torchvision_available", lambda: True)
        AutoImageProcessor.from_pretrained(tmp_path)
        assert type(load_processor(tmp_path)) is ViTImageProcessorPil
        assert chosen == ["torchvision", "pil"]

    def test_the_names_older_checkpoints_use(self, tmp_path):
        for changes in (
            {"image_processor_type": "ViTImageProcessorFast"},
            {"image_processor_type": None, "feature_extractor_type": "ViTFeatureExtractor"},
        ):
            assert type(load_processor(write_processor(tmp_path, **changes))) is ViTImageProcessorPil

    @pytest.mark.parametrize("changes", [{"size": {"height": 10**5, "width": 4}}, {"crop_size": 10**5}])
    def test_sizes_that_no_image_is_made_to(self, tmp_path, changes):
        message = refusal(load_processor, write_processor(tmp_path, **changes))
        assert message.endswith(" is 100000, and 8192 pixels are the longest side that is read")

    def test_a_bound_is_no_size(self, tmp_path):
        load_processor(write_processor(tmp_path, size={"shortest_edge": 8, "longest_edge": 10**7}))

    def test_refusals(self, tmp_path):
        assert refusal(load_processor, tmp_path) == (
            f"{tmp_path}: no image processor (preprocessor_config.json); "
            "copy the model's preprocessor_config.json into the folder"
        )
        path = tmp_path / "preprocessor_config.json"
        path.write_text("{")
        assert refusal(load_processor, tmp_path).startswith(f"{path} is not a readable JSON object (")
        path.write_text('{"image_processor_type": "NoSuchImageProcessor"}')
        assert refusal(load_processor, tmp_path).startswith(f"{tmp_path}: the image processor does not load: ")

    def test_the_part_of_a_file_for_all_processors_wins(self, tmp_path):
        folder = write_processor(tmp_path, resample=3)
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Any"}))
        assert load_processor(folder).resample == 3
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": {**PROCESSOR, "resample": 1}}))
        assert load_processor(folder).resample == 1
        (folder / "preprocessor_config.json").unlink()
        processor = load_processor(folder)
        assert (type(processor), processor.resample) == (ViTImageProcessorPil, 1)
        (folder / "processor_config.json").write_text('{"image_processor": null}')
        assert refusal(load_processor, folder).startswith(f"{folder}: no image processor (preprocessor_config.json); ")
        (folder / "processor_config.json").write_text('{"image_processor": 1}')
        assert refusal(load_processor, folder) == (
            f"{folder / 'processor_config.json'}: image_processor is not a JSON object; download or restore the file"
        )

    def test_the_class_of_the_model_where_the_file_names_none(self, tmp_path):
        folder = write_processor(tmp_path, image_processor_type=None)
        (folder / "config.json").write_text('{"model_type": "vit"}')
        assert type(load_processor(folder)) is ViTImageProcessorPil
        for config in ('{"model_type": "llama"}', "{}", "nothing"):
            (folder / "config.json").write_text(config)
            assert refusal(load_processor, folder).startswith(f"{folder}: the image processor does not load: ")


OURS = {"image_processor_type": "OursImageProcessor", "auto_map": {"AutoImageProcessor": "ours.OursImageProcessor"}}


class TestRemoteCode:
    """Files of code that say that they were imported: `ours.py` is the processor's, `theirs.py` the model's."""

    @pytest.fixture
    def ran(self, tmp_path, monkeypatch):
        """Return a function that says which files of code have been imported since its last call."""
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
        (tmp_path / "ran").mkdir()

        def since() -> set[str]:
            names = {path.name for path in (tmp_path / "ran").iterdir()}
            for name in names:
                (tmp_path / "ran" / name).unlink()
            return names

        return since

    def write(self, tmp_path, config=None, **changes):
        """A processor with code of its own, of a model with code of its own."""
        # transformers keeps modules by the folder's name
        folder = write_processor(tmp_path / f"remote-{tmp_path.name}", **changes)
        codes = {
            "ours": "from transformers import ViTImageProcessorPil\n"
            "class OursImageProcessor(ViTImageProcessorPil):\n    pass\n",
            "theirs": "from transformers import ViTConfig\n"
            "class TheirConfig(ViTConfig):\n    model_type = 'their-vit'\n",
        }
        for name, code in codes.items():
            marker = f"from pathlib import Path\nPath({str(tmp_path / 'ran' / name)!r}).touch()\n"
            (folder / f"{name}.py").write_text(marker + code)
        described = {"model_type": "their-vit", "auto_map": {"AutoConfig": "theirs.TheirConfig"}, **(config or {})}
        (folder / "config.json").write_text(json.dumps(described))
        return folder

    def asks(self, folder, file="preprocessor_config.json") -> str:
        return (
            f"{folder / file} asks for remote code (auto_map); read that code, then say --trust-remote-code to run it"
        )

    @pytest.mark.parametrize(
        "changes",
        [
            OURS,
            {"image_processor_type": None, "auto_map": OURS["auto_map"]},
            {
                "image_processor_type": None,
                "feature_extractor_type": "OursFeatureExtractor",
                "auto_map": {"AutoFeatureExtractor": "ours.OursFeatureExtractor"},
            },
        ],
        ids=["class", "no class", "feature extractor"],
    )
    def test_runs_only_when_trusted_and_without_the_models(self, tmp_path, ran, changes):
        folder = self.write(tmp_path, **changes)
        assert refusal(load_processor, folder) == self.asks(folder)
        assert ran() == set()
        assert type(load_processor(folder, trust_remote_code=True)).__name__ == "OursImageProcessor"
        assert ran() == {"ours"}

    @pytest.mark.parametrize("config", [{"model_type": "vit"}, {"image_processor_type": "ViTImageProcessorFast"}])
    def test_a_class_of_transformers_comes_first(self, tmp_path, ran, config):
        """Named by the processor's file, or by the model's config alone, whose code never runs."""
        named = {"image_processor_type": config.get("image_processor_type")}
        folder = self.write(tmp_path, config, **named, auto_map=OURS["auto_map"])
        for trust in (False, True):
            assert type(load_processor(folder, trust_remote_code=trust)) is ViTImageProcessorPil
        assert ran() == set()

    @pytest.mark.parametrize(
        ("config", "changes"),
        [
            ({}, {"image_processor_type": "ViTImageProcessor", "auto_map": OURS["auto_map"], "size": "x"}),
            ({}, {"image_processor_type": None}),
            ({"auto_map": OURS["auto_map"]}, {"image_processor_type": None}),
            ({}, {"image_processor_type": "OursImageProcessor", "auto_map": ["ours"]}),
            ({}, {"image_processor_type": "OursImageProcessor", "auto_map": {"AutoModel": "ours.Model"}}),
        ],
    )
    def test_nothing_else_runs(self, tmp_path, ran, config, changes):
        """A stock class that does not load is not replaced; the model's config names no code of the processor."""
        folder = self.write(tmp_path, config, **changes)
        for trust in (False, True):
            message = refusal(load_processor, folder, trust_remote_code=trust)
            assert message.startswith(f"{folder}: the image processor does not load: ")
        assert ran() == set()

    @pytest.mark.skipif(is_torchvision_available(), reason="then it loads")
    def test_one_that_only_torchvision_has_says_so(self, tmp_path, ran):
        folder = self.write(tmp_path, image_processor_type="DINOv3ViTImageProcessorFast")
        assert refusal(load_processor, folder) == (
            f"{folder}: its image processor needs torchvision: install the torchvision of your torch build"
        )

    def test_settings_of_a_model_of_images_with_text_leave_out_the_form_of_its_output(self):
        assert (image_settings("janus"), image_settings("internvl")) == ({}, {"crop_to_patches": True})

    def test_the_file_that_wins_decides(self, tmp_path, ran):
        folder = self.write(tmp_path, **OURS)
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))
        assert type(load_processor(folder, trust_remote_code=True)) is ViTImageProcessorPil
        assert ran() == set()
        write_processor(folder)
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": {**PROCESSOR, **OURS}}))
        assert refusal(load_processor, folder) == self.asks(folder, "processor_config.json")
        assert ran() == set()
        assert type(load_processor(folder, trust_remote_code=True)).__name__ == "OursImageProcessor"
        assert ran() == {"ours"}

    def test_code_that_fails(self, tmp_path, ran):
        folder = self.write(tmp_path, **OURS)
        (folder / "ours.py").write_text("raise KeyError('x')\n")
        message = refusal(load_processor, folder, trust_remote_code=True)
        assert message == f"{folder}: the image processor does not load: 'x'"


class TestCsv:
    def test_rows_of_the_split_sorted_by_path(self, tmp_path):
        write_images(tmp_path, ["images/b.png", "images/a.JPEG", "images/c.png"])
        write_csv(
            tmp_path / "labels.csv",
            *[
                "name,file,label,split",
                "x,images/b.png,2,eval",
                "y,images/a.JPEG,5,eval",
                "z,images/c.png,1,calib",
                "w,no.png,1,train",
            ],
        )
        for directory in (tmp_path, tmp_path / "images"):
            assert find_names_and_labels(directory) == [("a.JPEG", 5), ("b.png", 2)]
            assert find_names_and_labels(directory, "calib") == [("c.png", 1)]
            assert find_images(directory, split="calib").labels is None

    def test_without_splits_every_row_serves_both(self, tmp_path):
        write_images(tmp_path, ["a.png", "b.png"])
        write_csv(tmp_path / "labels.csv", "file,label", "a.png,0", "b.png,n05", "")
        assert (
            find_names_and_labels(tmp_path, "calib")
            == find_names_and_labels(tmp_path, "eval")
            == [("a.png", 0), ("b.png", 4)]
        )

    def test_files_relative_to_the_csv_or_to_the_folder(self, tmp_path):
        write_images(tmp_path, ["photos/a.png", "lists/here/b.png"])
        named = write_csv(tmp_path / "lists" / "mine.csv", "file,label", "a.png,0", "here/b.png,1")
        assert find_names_and_labels(tmp_path / "photos", labels=named) == [("b.png", 1), ("a.png", 0)]

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    def test_as_spreadsheets_write_them(self, tmp_path, encoding, delimiter):
        write_images(tmp_path, ["a.png"])
        rows = f"file{delimiter} label\r\na.png{delimiter} 3\r\n"
        (tmp_path / "labels.csv").write_bytes(rows.encode(encoding))
        assert find_names_and_labels(tmp_path) == [("a.png", 3)]

    def test_images_are_what_the_csv_names_by_any_suffix(self, tmp_path):
        write_images(tmp_path, ["a.png", "other.png"])
        (tmp_path / "a.png").rename(tmp_path / "a.img")
        write_csv(tmp_path / "labels.csv", "file,label", "a.img,0")
        assert find_names_and_labels(tmp_path) == [("a.img", 0)]

    def test_a_csv_beside_the_folder_counts_for_the_folder_alone(self, tmp_path):
        write_images(tmp_path, ["train/a.png", "val/a.png", "other/n06/c.png"])
        write_csv(tmp_path / "labels.csv", "file,label", "train/a.png,0", "val/a.png,1")
        assert find_names_and_labels(tmp_path / "val") == [("a.png", 1)]
        assert find_names_and_labels(tmp_path / "other") == [("c.png", 5)]
        assert [label for _, label in find_names_and_labels(tmp_path)] == [0, 1]
        write_csv(tmp_path / "labels.csv", "id,breed", "a,collie")
        assert find_images(tmp_path / "val", split="eval", id2label=ID2LABEL).labels is None

    def test_several_folders(self, tmp_path):
        """They have classes if each has."""
        for folder, classes in (("a", ["0", "1"]), ("b", ["2"])):
            write_images(tmp_path / folder, [f"{label}/x.png" for label in classes])
        write_images(tmp_path / "plain", ["y.png"])
        a, b, plain = (tmp_path / name for name in ("a", "b", "plain"))
        found = find_all_images([b, a], split="eval", id2label=ID2LABEL)
        assert [path.relative_to(tmp_path).as_posix() for path in found.paths] == [
            "b/2/x.png",
            "a/0/x.png",
            "a/1/x.png",
        ]
        assert (found.labels, found.counts) == ((2, 0, 1), (1, 2))
        assert find_all_images([a, plain], split="eval", id2label=ID2LABEL).labels is None
        write_csv(tmp_path / "plain" / "labels.csv", "file,label,split", "y.png,0,eval")
        assert find_all_images([plain], split="eval", id2label=ID2LABEL).split == "split eval of labels.csv"
        assert refusal(find_all_images, [a, b], labels=Path("l.csv"), split="eval") == (
            "--labels l.csv is of one folder: give one --images, or a labels.csv in each"
        )

    def test_the_working_folder(self, tmp_path, monkeypatch):
        write_images(tmp_path, ["images/a.png"])
        write_csv(tmp_path / "labels.csv", "file,label", "images/a.png,3")
        monkeypatch.chdir(tmp_path / "images")
        assert find_names_and_labels(Path()) == [("a.png", 3)]

    def test_refusals(self, tmp_path):
        write_images(tmp_path, ["a.png", "b.png"])
        file = tmp_path / "labels.csv"

        def read_refusal(*rows, **options):
            write_csv(file, *rows)
            return refusal(find_names_and_labels, tmp_path, **options)

        assert read_refusal("file,class", "a.png,0") == f"{file}: no column label, its columns are file, class"
        assert read_refusal("name,label", "a.png,0") == f"{file}: no column file, its columns are name, label"
        assert (
            read_refusal("name,label", "a.png,0", id2label=None)
            == f"{file}: no column file, its columns are name, label"
        )
        assert read_refusal("file,label") == (
            f"{file}: no rows; it needs the columns file and label, its columns are file, label"
        )
        assert read_refusal("file,label", "a.png,0", "no.png,1", "nor.png,2") == (
            f"{file}: 2 of 3 files are not there, the first is no.png; they are looked for in {tmp_path} and {tmp_path}"
        )
        assert read_refusal("file,label,split", "a.png,0,train", "b.png,1,calib") == (
            f"{file}: no row of split eval; its splits are calib, train"
        )
        assert read_refusal("file,label", "a.png,0", "./a.png,1") == f"{file}, line 3: ./a.png is named twice"
        for label in ("6", "cup", ""):
            assert read_refusal("file,label", "b.png,5", f"a.png,{label}") == (
                f"{file}, line 3: label '{label}' is none of the model's 6 classes, which look like 'n01 tench'; "
                "give a class's index or its name in config.json's id2label"
            )
        file.write_bytes(b"file,label\n\xff.png,0\n")
        assert refusal(find_names_and_labels, tmp_path).startswith(
            f"{file}: not UTF-8 text (byte 11); give a CSV in UTF-8"
        )
        assert (
            refusal(find_names_and_labels, tmp_path, labels=tmp_path / "no.csv")
            == f"{tmp_path / 'no.csv'}: no such labels file"
        )


class TestClassNames:
    @pytest.mark.parametrize(
        ("folder", "index"), [("n02 great white shark", 1), ("n02", 1), ("4", 4), ("n06 cup", 5), ("0", 0)]
    )
    def test_of_a_folder(self, tmp_path, folder, index):
        write_images(tmp_path, [f"{folder}/a.png", f"{folder}/deeper/b.PNG"])
        assert find_names_and_labels(tmp_path) == [("a.png", index), ("b.PNG", index)]

    def test_sorted_by_folder_then_file(self, tmp_path):
        write_images(tmp_path, ["n03/b.png", "n01/z.png", "n03/a.png"])
        write_image(tmp_path / "n05" / ".hidden.png")
        (tmp_path / "empty").mkdir()
        assert find_names_and_labels(tmp_path) == [("z.png", 0), ("a.png", 2), ("b.png", 2)]
        assert find_images(tmp_path, split="calib").labels is None

    def test_a_number_that_is_a_name_too(self, tmp_path):
        digits = {0: "1", 1: "0"}
        write_images(tmp_path, ["images/1/a.png"])
        write_csv(tmp_path / "labels.csv", "file,label", "images/1/a.png,1")
        assert find_names_and_labels(tmp_path, id2label=digits) == [("a.png", 1)]
        (tmp_path / "labels.csv").unlink()
        assert find_names_and_labels(tmp_path / "images", id2label=digits) == [("a.png", 0)]

    def test_the_whole_name_before_the_first_word(self, tmp_path):
        write_images(tmp_path, ["maillot/a.png"])
        assert find_names_and_labels(tmp_path, id2label={0: "maillot tank suit", 1: "maillot"}) == [("a.png", 1)]

    def test_refusals(self, tmp_path):
        write_images(tmp_path, ["great/a.png"])
        assert refusal(find_names_and_labels, tmp_path) == (
            f"{tmp_path / 'great'}: label 'great' is none of the model's 6 classes, which look like 'n01 tench'; "
            "give a class's index or its name in config.json's id2label"
        )
        assert refusal(find_names_and_labels, tmp_path, id2label={0: "great white shark", 1: "great grey owl"}) == (
            f"{tmp_path / 'great'}: label 'great' fits 2 of the model's classes; use the class's index"
        )


class TestFlatFolder:
    def test_every_image_without_classes(self, tmp_path):
        write_images(tmp_path, ["b.png", "a.JPG", "c.webp"])
        (tmp_path / "README.md").write_text("not an image")
        write_image(tmp_path / "._a.png")
        files = find_images(tmp_path, split="calib", id2label=ID2LABEL)
        assert files == ImageFiles(tuple(tmp_path / name for name in ("a.JPG", "b.png", "c.webp")))

    def test_refusals(self, tmp_path):
        assert refusal(find_names_and_labels, tmp_path / "no") == f"{tmp_path / 'no'}: no such image folder"
        (tmp_path / "a.txt").write_text("")
        assert refusal(find_names_and_labels, tmp_path / "a.txt") == f"{tmp_path / 'a.txt'}: no such image folder"
        assert refusal(find_names_and_labels, tmp_path) == (
            f"{tmp_path}: no images (.bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp) in it or in its sub-folders"
        )
        write_images(tmp_path, ["a.png", "n01/b.png"])
        assert refusal(find_names_and_labels, tmp_path) == (
            f"{tmp_path}: images both in the folder and in its sub-folders (n01); "
            "give a folder of images, or one with a sub-folder per class"
        )


class TestChoose:
    FILES = ImageFiles(tuple(Path(f"{i:02}.png") for i in range(50)), tuple(range(50)))

    @given(st.integers(1, 50), st.integers(0, 2**63 - 1))
    def test_a_subset_with_its_labels(self, samples, seed):
        chosen = choose_images(self.FILES, samples=samples, seed=seed)
        assert len(set(chosen.paths)) == samples
        assert set(chosen.paths) <= set(self.FILES.paths)
        assert [f"{label:02}.png" for label in chosen.labels] == [path.name for path in chosen.paths]
        assert choose_images(self.FILES, samples=samples, seed=seed) == chosen

    def test_seeds_choose_differently_and_the_same_everywhere(self):
        assert choose_images(self.FILES, samples=5, seed=0).labels == (44, 39, 7, 6, 17)
        assert choose_images(self.FILES, samples=5, seed=1).labels != (44, 39, 7, 6, 17)

    def test_first(self):
        assert choose_images(self.FILES, samples=3, choose="first", skip=1).labels == (1, 2, 3)

    def test_refusals(self):
        assert refusal(choose_images, self.FILES, samples=51) == (
            "there are 50 images, 51 are asked for; give more images, or at most 50 samples"
        )
        assert refusal(choose_images, self.FILES, samples=0) == "samples must be at least 1, not 0"

    def test_folders_give_equal_shares_that_are_mixed(self):
        """One of 3 images, one of 5 and one of 12: of 14 the first gives all, the others 5 and 6."""
        files = ImageFiles(tuple(Path(f"{at}.png") for at in range(20)), tuple(range(20)), (3, 5, 12))

        def folders(chosen):
            return [0 if label < 3 else 1 if label < 8 else 2 for label in chosen.labels]

        for how in ("first", "random"):
            chosen = choose_images(files, samples=14, choose=how)
            assert [folders(chosen).count(folder) for folder in range(3)] == [3, 5, 6]
            assert set(folders(chosen)[:7]) == set(folders(chosen)[7:]) == {0, 1, 2}
            later = choose_images(files, samples=6, choose=how, skip=14)
            assert folders(later) == [2] * 6
            assert len({*chosen.labels, *later.labels}) == 20
        assert choose_images(files, samples=6, choose="first").labels == (0, 3, 8, 1, 4, 9)


@pytest.fixture
def processor(tmp_path):
    return load_processor(write_processor(tmp_path / "vit"))


def patches(size: tuple[int, int]) -> int:
    """Tokens of a model with patches of two by four and one token more."""
    return size[0] // 2 * (size[1] // 4) + 1


def samples_of(paths, processor, **options) -> ImageSamples:
    files = ImageFiles(tuple(paths), tuple(range(len(paths))))
    return ImageSamples(files, processor, **{"tokens": patches, **options})


class TestImageSamples:
    def test_values_are_those_of_the_processor(self, tmp_path, processor):
        paths = [
            write_image(tmp_path / "a.png"),
            write_image(tmp_path / "b.jpg", 1, (30, 7)),
            write_image(tmp_path / "c.png", 2, (9, 9), "L"),
            write_image(tmp_path / "d.png", 3, (9, 9), "RGBA"),
            write_image(tmp_path / "e.gif", 4, (9, 9), "P"),
            write_image(tmp_path / "f.png", 5, (12, 3)),  # three pixels high: not an image with its channels first
        ]
        samples = samples_of(paths, processor)
        assert (len(samples), samples.tokens, samples.size) == (6, 9, (3, SIZE, SIZE))
        assert samples.labels.tolist() == [0, 1, 2, 3, 4, 5]
        assert samples.skipped == ()
        batch = samples.batch(slice(0, 6))
        assert list(batch) == ["pixel_values"]
        assert batch["pixel_values"].dtype == torch.float32
        expected = np.stack([preprocess(path) for path in paths])
        assert np.abs(batch["pixel_values"].numpy() - expected).max() < 1e-6
        for rows in (slice(2, 5), slice(4, 99), slice(3, 3)):
            assert torch.equal(samples.batch(rows)["pixel_values"], batch["pixel_values"][rows])

    def test_tokens_are_those_of_the_processed_size(self, tmp_path):
        path = write_image(tmp_path / "a.png", size=(30, 40))
        sizes = []
        for height, width in ((12, 8), (8, 12)):
            processor = load_processor(write_processor(tmp_path / "vit", size={"height": height, "width": width}))
            samples = samples_of([path], processor, tokens=lambda size: sizes.append(size) or patches(size))
            assert samples.tokens == samples.tokens == height // 2 * (width // 4) + 1
        assert sizes == [(12, 8), (8, 12)]  # once each, and only for who wants to know

    def test_read_when_asked_for(self, tmp_path, processor):
        paths = write_images(tmp_path, ["a.png", "b.png"])
        samples = samples_of(paths, processor)
        paths[1].write_bytes(b"changed")
        assert samples.batch(slice(0, 1))["pixel_values"].shape == (1, 3, SIZE, SIZE)
        assert refusal(samples.batch, slice(0, 2)) == f"{paths[1]} changed since it was opened; run again"
        paths[0].unlink()
        assert refusal(samples.batch, slice(0, 1)).startswith(f"{paths[0]} does not decode any more: ")

    def test_fingerprint(self, tmp_path, processor):
        a, b = write_images(tmp_path, ["a.png", "b.png"])
        digest = hashlib.sha256()
        for path in (a, b):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        digest.update(processor.to_json_string().encode())
        one = samples_of([a, b], processor).fingerprint
        assert one == digest.hexdigest()
        # neither names nor classes count, order and preprocessing do
        a.rename(tmp_path / "z.png")
        assert ImageSamples(ImageFiles((tmp_path / "z.png", b)), processor, tokens=patches).fingerprint == one
        assert samples_of([b, tmp_path / "z.png"], processor).fingerprint != one
        other = load_processor(write_processor(tmp_path / "other", resample=3))
        assert samples_of([tmp_path / "z.png", b], other).fingerprint != one

    def test_images_of_different_sizes(self, tmp_path):
        processor = load_processor(write_processor(tmp_path / "vit", do_resize=False))
        paths = [write_image(tmp_path / f"{i}.png", i, size) for i, size in enumerate([(9, 8), (9, 8), (8, 9)])]
        samples = samples_of(paths, processor)
        assert samples.batch(slice(0, 2))["pixel_values"].shape == (2, 3, 8, 9)
        assert refusal(samples.batch, slice(0, 3)) == (
            f"{paths[2]} is 3 x 9 x 8 after preprocessing, {paths[0]} is 3 x 8 x 9: "
            "images must come out in one size; set a crop or a fixed size in preprocessor_config.json"
        )

    def test_a_processor_that_fails_or_cuts_into_tiles(self, tmp_path, processor):
        path = write_image(tmp_path / "a.png")
        processor.image_std = (1.0, 1.0)
        assert refusal(samples_of, [path], processor).startswith(f"{path}: the image processor fails on it: ")

        class Tiles:
            def __call__(self, **kwargs):
                return {"pixel_values": torch.zeros(1, 4, 3, 2, 2)}

            def to_json_string(self):
                return ""

        assert refusal(samples_of, [path], Tiles()) == (
            "the image processor makes 1 x 4 x 3 x 2 x 2 values of one image, not 1 x channels x height x width: "
            "models that cut images into tiles are not supported"
        )


class TestCorrupt:
    def damaged(self, tmp_path) -> list[Path]:
        paths = write_images(tmp_path, [f"{i}.png" for i in range(8)])
        content = paths[2].read_bytes()
        paths[2].write_bytes(content[: len(content) // 2])  # opens, and fails only when its pixels are read
        paths[5].write_text("no image")
        return paths

    def test_named_and_left_out(self, tmp_path, processor):
        paths = self.damaged(tmp_path)
        samples = samples_of(paths, processor, max_corrupt=0.25)
        assert samples.skipped == (str(paths[2]), str(paths[5]))
        assert len(samples) == 6
        assert samples.labels.tolist() == [0, 1, 3, 4, 6, 7]
        assert samples.fingerprint == samples_of([*paths[:2], *paths[3:5], *paths[6:]], processor).fingerprint
        expected = np.stack([preprocess(paths[i]) for i in (0, 1, 3, 4, 6, 7)])
        assert np.abs(samples.batch(slice(0, 8))["pixel_values"].numpy() - expected).max() < 1e-6

    def test_more_than_the_share(self, tmp_path, processor):
        paths = self.damaged(tmp_path)
        start = "2 of 8 images do not decode, more than the allowed share of "
        assert refusal(samples_of, paths, processor).startswith(f"{start}0.05; the first is {paths[2]}: ")
        assert refusal(samples_of, paths, processor, max_corrupt=0.24).startswith(f"{start}0.24; ")
        assert refusal(samples_of, [paths[5]], processor, max_corrupt=1) == (
            f"none of 1 images decodes; the first is {paths[5]}: not a BMP, GIF, JPEG, PNG, PPM, TIFF or WEBP image"
        )
        assert refusal(samples_of, [], processor) == "no images given: name at least one"

    def test_whatever_a_file_is(self, tmp_path, processor):
        good = write_image(tmp_path / "a.png")
        empty, folder, bomb = tmp_path / "empty.png", tmp_path / "folder.png", tmp_path / "bomb.ppm"
        empty.touch()
        folder.mkdir()
        bomb.write_bytes(b"P6 60000 60000 255\n")
        unusual = write_image(tmp_path / "a.pcx")  # whole, and Pillow reads it, as it does PostScript by Ghostscript
        (tmp_path / "link.png").symlink_to("nowhere")
        paths = [good, empty, folder, bomb, unusual, tmp_path / "link.png"]
        assert samples_of(paths, processor, max_corrupt=1).skipped == tuple(str(path) for path in paths[1:])


GREY = (np.random.default_rng(0).random((10, 12)) * 255).astype(np.uint8)
DEEP = GREY.astype(np.uint16) * 257


class TestDepths:
    """Pixels of more than 8 bits are those of 8; what says nothing of its white is left out and named."""

    def values(self, path: Path, processor) -> torch.Tensor:
        return samples_of([path], processor).batch(slice(0, 1))["pixel_values"]

    @pytest.fixture
    def expected(self, tmp_path, processor) -> torch.Tensor:
        Image.fromarray(GREY).save(tmp_path / "grey.png")
        return self.values(tmp_path / "grey.png", processor)

    @pytest.mark.parametrize("name", ["deep.png", "deep.tif", "deep.pgm"])
    def test_sixteen_bits_are_the_same_picture(self, tmp_path, processor, expected, name):
        path = tmp_path / name
        if name.endswith(".pgm"):
            path.write_bytes(b"P5 12 10 65535\n" + DEEP.astype(">u2").tobytes())
        else:
            Image.fromarray(DEEP).save(path)
        assert torch.equal(self.values(path, processor), expected)

    def test_sixteen_bits_of_every_colour_are_the_same_picture(self, tmp_path, processor, expected):
        rows = b"".join(b"\0" + np.repeat(row[:, None], 3, 1).astype(">u2").tobytes() for row in DEEP)
        (tmp_path / "deep.png").write_bytes(png(12, 10, depth=16, colour=2, data=rows))
        assert torch.equal(self.values(tmp_path / "deep.png", processor), expected)

    def test_white_may_be_zero(self, tmp_path, processor, expected):
        Image.fromarray(65535 - DEEP).save(tmp_path / "negative.tif", tiffinfo={262: 0})
        with Image.open(tmp_path / "negative.tif") as image:
            assert image.tag_v2[262] == 0
        assert torch.equal(self.values(tmp_path / "negative.tif", processor), expected)

    @pytest.mark.parametrize(("kind", "numbers"), [(np.int32, "integers"), (np.float32, "floats")])
    def test_numbers_without_a_white_are_refused(self, tmp_path, processor, kind, numbers):
        Image.fromarray(GREY.astype(kind)).save(tmp_path / "a.tif")
        assert refusal(samples_of, [tmp_path / "a.tif"], processor).endswith(
            f"a.tif: its pixels are {numbers} of 32 bits, and nothing says which is white: save it with 8 or 16 bits"
        )

    def test_other_modes_are_the_same_picture(self, tmp_path, processor, expected):
        grey = Image.fromarray(GREY)
        see_through = grey.convert("RGB")
        see_through.putalpha(Image.new("L", grey.size, 255))
        images = {"p.png": grey.convert("P"), "a.png": see_through, "c.tif": grey.convert("RGB").convert("CMYK")}
        for name, image in images.items():
            image.save(tmp_path / name)
            assert torch.allclose(self.values(tmp_path / name, processor), expected, atol=0.02)

    def test_the_side_that_is_up(self, tmp_path, processor, expected):
        turned, exif = Image.fromarray(GREY).transpose(Image.Transpose.ROTATE_90), Image.Exif()
        exif[0x0112] = 6  # a viewer turns it to the right
        turned.save(tmp_path / "turned.png", exif=exif)
        assert torch.equal(self.values(tmp_path / "turned.png", processor), expected)


def png(width: int, height: int, *, depth: int, colour: int, data: bytes) -> bytes:
    """A PNG of rows that begin with their filter's number."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    head = width.to_bytes(4) + height.to_bytes(4) + bytes([depth, colour, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
