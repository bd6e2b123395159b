"""Sounds as model input: features of a fixed length, read or made when a batch is asked for."""

import hashlib
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from transformers import AutoFeatureExtractor

from ckpt_prune.checkpoint.digests import PROCESSOR
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.image_files import describe_error

SUFFIXES = (".npy", ".safetensors", ".wav")
"""What a file of sound, or of its features, is known by; upper case counts too."""


def find_audio(directory: Path) -> list[Path]:
    """Files of sound or of features in a folder and below it, sorted.

    Raises:
        UserError: there is no such folder, or none in it.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder of audio")
    found = [p for p in directory.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")]
    if not found:
        raise UserError(f"{directory}: no audio ({' '.join(SUFFIXES)}) in it or in its sub-folders")
    return sorted(found, key=lambda path: path.as_posix())


def load_extractor(folder: Path) -> Any:
    """The feature extractor of a checkpoint folder, from local files only.

    Raises:
        UserError: there is none that transformers loads.
    """
    if not (folder / PROCESSOR).is_file():
        raise UserError(
            f"{folder}: no feature extractor ({PROCESSOR}), which .wav files go through; copy the model's {PROCESSOR} "
            "into the folder, or give features (.npy, .safetensors)"
        )
    try:
        return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises anything here
        raise UserError(f"{folder}: the feature extractor does not load: {describe_error(error)}") from error


class AudioSamples:
    """Sounds as an encoder of speech is called with them.

    Every file is read once when this is made, so that one that cannot be used is known before any work.

    Args:
        paths: files, .wav, or features of one sound.
        folder: of the checkpoint, whose feature extractor .wav files go through.
        channels: of the features that the model reads.
        frames: of them.
        tokens: that the model makes of a sound.

    Raises:
        UserError: a file cannot be read, is sampled at another rate, or has features of another shape.
    """

    def __init__(self, paths: list[Path], folder: Path, *, channels: int, frames: int, tokens: int) -> None:
        self.paths, self.tokens, self._shape = paths, tokens, (channels, frames)
        waves = any(path.suffix.lower() == ".wav" for path in paths)
        self._extractor: Any = load_extractor(folder) if waves else None
        digest = hashlib.sha256()
        for path in track(paths, "checking audio", unit="file"):
            self._features(path)
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        if self._extractor is not None:
            digest.update(self._extractor.to_json_string().encode())
        self.fingerprint = digest.hexdigest()
        """sha256 in hex over the digests of the files' bytes, in order, and the extractor's settings as JSON."""

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """`input_features` of a run of sounds, float32 (sounds, channels, frames)."""
        return {"input_features": torch.stack([self._features(path) for path in self.paths[rows]])}

    def _features(self, path: Path) -> Tensor:
        try:
            found = self._read(path)
        except UserError:
            raise
        except wave.Error as error:  # "unknown format: 3" of floats
            raise UserError(
                f"{path} cannot be read: {describe_error(error)}; integers of 8, 16, 24 or 32 bits are read, and "
                f"`ffmpeg -i {path.name} -c:a pcm_s16le OUT.wav` makes such a file"
            ) from error
        except (OSError, ValueError, EOFError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {describe_error(error)}") from error
        if tuple(found.shape) != self._shape:
            raise UserError(
                f"{path} has features of {' x '.join(map(str, found.shape))}, and this model reads "
                f"{self._shape[0]} channels x {self._shape[1]} frames: pad or cut them"
            )
        if not all_finite(found):
            raise UserError(f"{path} holds NaN or Inf")
        return found

    def _read(self, path: Path) -> Tensor:
        kind = path.suffix.lower()
        if kind == ".wav":
            values = self._extractor(read_wave(path, self._extractor.sampling_rate), **self._how)["input_features"]
            return torch.as_tensor(values)[0].float()
        if kind == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float32))
        held = load(path.read_bytes())
        if len(held) != 1:
            raise UserError(f"{path} holds {len(held)} tensors, where the features of one sound are meant")
        return next(iter(held.values())).float()

    @property
    def _how(self) -> dict[str, Any]:
        return {"sampling_rate": self._extractor.sampling_rate, "return_tensors": "pt"}


_STEPS: dict[int, tuple[str, int, int]] = {
    1: ("u1", 128, 2**7),
    2: ("<i2", 0, 2**15),
    3: ("<i4", 0, 2**31),
    4: ("<i4", 0, 2**31),
}
"""Bytes of a number of a PCM file → the type it is read as, what silence is, and the loudest."""


def read_wave(path: Path, rate: int) -> Any:
    """Numbers of a PCM .wav file from -1 to 1, its channels averaged, float32 (samples,)."""
    with wave.open(str(path), "rb") as file:
        if file.getframerate() != rate:
            raise UserError(
                f"{path} is sampled at {file.getframerate()} Hz, and this model hears {rate} Hz: "
                f"`ffmpeg -i {path.name} -ar {rate} OUT.wav` makes such a file"
            )
        if file.getsampwidth() not in _STEPS:
            raise UserError(f"{path} has numbers of {8 * file.getsampwidth()} bits, where 8, 16, 24 or 32 are read")
        kind, silence, loudest = _STEPS[file.getsampwidth()]
        data = file.readframes(file.getnframes())
        if not data:
            raise UserError(f"{path} holds no sound")
        if file.getsampwidth() == 3:  # the upper bytes of 32 bits
            data = np.pad(np.frombuffer(data, "u1").reshape(-1, 3), ((0, 0), (1, 0))).tobytes()
        values = np.frombuffer(data, kind).astype(np.float32)
        return ((values - silence) / loudest).reshape(-1, file.getnchannels()).mean(1)
