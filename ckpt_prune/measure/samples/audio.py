"""Sounds as model input: features of a fixed length, read or made when a batch is asked for."""

import hashlib
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from ckpt_prune.checkpoint.digests import PROCESSOR
from ckpt_prune.checkpoint.files import Stamp, read_unchanged
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.image_files import describe_error

SUFFIXES = (".npy", ".safetensors", ".wav")
"""Endings of files of sound, or of its features, in upper or lower case."""


def find_audio(directory: Path) -> list[Path]:
    """Find files of sound or of features in a folder and below it, sorted."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder of audio")
    paths = [p for p in directory.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")]
    if not paths:
        raise UserError(f"{directory}: no audio ({' '.join(SUFFIXES)}) in it or in its sub-folders")
    return sorted(paths, key=lambda path: path.as_posix())


def _load_extractor(folder: Path) -> Any:
    """Load the feature extractor of a checkpoint folder, from local files only."""
    if not (folder / PROCESSOR).is_file():
        raise UserError(
            f"{folder}: no feature extractor ({PROCESSOR}), which .wav files go through; copy the model's {PROCESSOR} "
            "into the folder, or give features (.npy, .safetensors)"
        )
    from transformers import AutoFeatureExtractor

    try:
        return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises anything here
        raise UserError(f"{folder}: the feature extractor does not load: {describe_error(error)}") from error


class AudioSamples:
    """Sounds as an encoder of speech is called with them.

    Every file is read once when this is made, so that one that cannot be used is known before any work.

    Args:
        paths: .wav files, or features of one sound each.
        folder: the checkpoint, whose feature extractor .wav files go through.
        channels, frames: of the features that the model reads.
        tokens: that the model makes of a sound.

    Attributes:
        fingerprint: SHA-256 in hex over the digests of the files' bytes, in order, and the extractor's settings.
    """

    def __init__(self, paths: list[Path], folder: Path, *, channels: int, frames: int, tokens: int) -> None:
        self.paths, self.tokens, self._shape = paths, tokens, (channels, frames)
        has_waves = any(path.suffix.lower() == ".wav" for path in paths)
        self._stamps: dict[Path, Stamp] = {}
        self._extractor: Any = _load_extractor(folder) if has_waves else None
        digest = hashlib.sha256()
        for path in track(paths, "checking audio", unit="file"):
            self._read_features(path)
            digest.update(hashlib.sha256(read_unchanged(path, self._stamps)).digest())
        if self._extractor is not None:
            digest.update(self._extractor.to_json_string().encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """Return `input_features` of a run of sounds, float32 (sounds, channels, frames)."""
        return {"input_features": torch.stack([self._read_features(path) for path in self.paths[rows]])}

    def _read_features(self, path: Path) -> Tensor:
        try:
            features = self._read(path, read_unchanged(path, self._stamps))
        except UserError:
            raise
        except wave.Error as error:  # "unknown format: 3" of floats
            raise UserError(
                f"{path} cannot be read: {describe_error(error)}; integers of 8, 16, 24 or 32 bits are read, and "
                f"`ffmpeg -i {path.name} -c:a pcm_s16le OUT.wav` makes such a file"
            ) from error
        except Exception as error:  # the libraries raise anything: of damaged headers, of sizes that cannot be
            raise UserError(f"{path} cannot be read: {describe_error(error)}") from error
        if tuple(features.shape) != self._shape:
            raise UserError(
                f"{path} has features of {' x '.join(map(str, features.shape)) or 'no axes'}, and this model reads "
                f"{self._shape[0]} channels x {self._shape[1]} frames: pad or cut them"
            )
        if not all_finite(features):
            raise UserError(f"{path} holds NaN or Inf")
        return features

    def _read(self, path: Path, data: bytes) -> Tensor:
        kind = path.suffix.lower()
        if kind == ".wav":
            rate = self._extractor.sampling_rate
            values = self._extractor(read_wave(path, data, rate), sampling_rate=rate, return_tensors="pt")[
                "input_features"
            ]
            return torch.as_tensor(values)[0].float()
        if kind == ".npy":
            array = np.load(io.BytesIO(data), allow_pickle=False)
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
                raise ValueError("it holds no array of numbers")
            return torch.from_numpy(array.astype(np.float32))
        tensors = load(data)
        if len(tensors) != 1:
            raise UserError(f"{path} holds {len(tensors)} tensors, where the features of one sound are meant")
        return next(iter(tensors.values())).float()


_SAMPLE_FORMATS: dict[int, tuple[str, int, int]] = {
    1: ("u1", 128, 2**7),
    2: ("<i2", 0, 2**15),
    3: ("<i4", 0, 2**31),
    4: ("<i4", 0, 2**31),
}
"""Bytes of a number of a PCM file → the type it is read as, the value of silence, and the loudest."""


def read_wave(path: Path, content: bytes, rate: int) -> Any:
    """Read the numbers of a PCM .wav file, from -1 to 1, its channels averaged: float32 (samples,)."""
    with wave.open(io.BytesIO(content), "rb") as file:
        width = file.getsampwidth()
        if file.getframerate() != rate:
            raise UserError(
                f"{path} is sampled at {file.getframerate()} Hz, and this model hears {rate} Hz: "
                f"`ffmpeg -i {path.name} -ar {rate} OUT.wav` makes such a file"
            )
        if width not in _SAMPLE_FORMATS:
            raise UserError(f"{path} has numbers of {8 * width} bits, where 8, 16, 24 or 32 are read")
        kind, silence, loudest = _SAMPLE_FORMATS[width]
        data = file.readframes(file.getnframes())
        if not data:
            raise UserError(f"{path} holds no sound")
        if width == 3:  # the upper bytes of 32 bits
            data = np.pad(np.frombuffer(data, "u1").reshape(-1, 3), ((0, 0), (1, 0))).tobytes()
        values = np.frombuffer(data, kind).astype(np.float32)
        return ((values - silence) / loudest).reshape(-1, file.getnchannels()).mean(1)
