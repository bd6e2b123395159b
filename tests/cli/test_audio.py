"""`--audio`: the encoder of a model of speech, on sounds and on features of sounds."""

import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import WhisperFeatureExtractor

from ckpt_prune.model.skeleton import quiet_transformers
from tests.cli.running import ok, read_refusal
from tests.contract.test_parts import FRAMES, MELS, PartCase

RATE, HOP = 16000, 1142
"""One second of sound makes as many frames as the model reads."""
ENCODER = ("prune", "whisper", "--part", "encoder", "--recipe", "corp-mlp", "--ratio", "0.25")


def write_sound(path: Path, seed: int, *, rate: int = RATE, channels: int = 1) -> None:
    values = np.random.default_rng(seed).integers(-9000, 9000, rate * channels // 2).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(values.tobytes())


def make_sounds(place: Path) -> Path:
    """A model of speech in `whisper`, and three sounds and features of two in `sounds`, which is returned."""
    with quiet_transformers():
        PartCase("whisper", "encoder", ()).model.save_pretrained(place / "whisper")
    settings = {"sampling_rate": RATE, "hop_length": HOP, "chunk_length": 1, "n_fft": 400}
    WhisperFeatureExtractor(feature_size=MELS, **settings).save_pretrained(place / "whisper")
    sounds = place / "sounds"
    sounds.mkdir()
    for seed in range(3):
        write_sound(sounds / f"{seed}.wav", seed, channels=1 + seed % 2)
    features = torch.randn(2, MELS, FRAMES, generator=torch.Generator().manual_seed(0))
    np.save(sounds / "3.npy", features[0].numpy())
    save_file({"input_features": features[1].contiguous()}, sounds / "4.safetensors")
    return sounds


@pytest.fixture
def whisper(place: Path) -> Path:
    return make_sounds(place)


def test_an_encoder_is_pruned_on_sounds_and_features(whisper: Path) -> None:
    output = ok(*ENCODER, "--audio", "sounds", "-o", "out")
    assert "kept per block: mlp 17/22" in output
    config, dense = (json.loads(Path(folder, "config.json").read_text()) for folder in ("out", "whisper"))
    assert {key: value for key, value in config.items() if dense.get(key) != value} == {"encoder_ffn_dim": 17}
    before, after = (load_file(Path(folder, "model.safetensors")) for folder in ("whisper", "out"))
    assert after["model.encoder.layers.0.fc2.weight"].shape == (16, 17)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if "encoder.layers" not in name)
    assert "52 tensors outside the encoder part are the dense model's, bit for bit" in ok(
        "verify", "out", "--against", "whisper"
    )


def test_sounds_are_what_the_extractor_makes_of_them(whisper: Path) -> None:
    """Features given in place of sounds are measured the same."""
    extractor = WhisperFeatureExtractor.from_pretrained("whisper")
    Path("features").mkdir()
    for seed in range(3):
        with wave.open(str(whisper / f"{seed}.wav")) as file:
            values = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        features = extractor(values.mean(1).astype(np.float32) / 2**15, sampling_rate=RATE, return_tensors="np")
        np.save(f"features/{seed}.npy", features["input_features"][0])
    for path in (whisper / "3.npy", whisper / "4.safetensors"):
        path.unlink()
    for folder in ("sounds", "features"):
        ok("calibrate", "whisper", "--part", "encoder", "--audio", folder, "--collect", "moments", "-o", f"of-{folder}")
    from_sounds, expected = (load_file(f"of-{folder}/block-00001.safetensors") for folder in ("sounds", "features"))
    assert from_sounds.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(from_sounds[name], tensor, rtol=1e-5, atol=1e-5)


def test_what_no_encoder_hears_is_refused(whisper: Path) -> None:
    assert read_refusal(*ENCODER, "-o", "out").endswith(
        "needs statistics: give --audio DIR to measure them, or --statistics STATS"
    )
    Path("text.txt").write_text("what")
    assert read_refusal(*ENCODER, "--text", "text.txt", "-o", "out") == (
        "whisper reads audio: give --audio DIR, or --data FILE of audio with its text"
    )
    assert read_refusal(*ENCODER, "--audio", "whisper/none", "-o", "out") == (
        "--audio whisper/none: there is no such file or folder"
    )
    assert read_refusal(*ENCODER, "--audio", "sounds", "--text", "text.txt", "-o", "out") == (
        "give --text or --audio, not both"
    )
    np.save(whisper / "3.npy", np.zeros((MELS, FRAMES + 1), np.float32))
    assert read_refusal(*ENCODER, "--audio", "sounds", "-o", "out") == (
        f"sounds/3.npy has features of {MELS} x {FRAMES + 1}, and this model reads {MELS} channels x {FRAMES} "
        "frames: pad or cut them"
    )
    write_sound(whisper / "0.wav", 0, rate=800)
    assert read_refusal(*ENCODER, "--audio", "sounds", "-o", "out") == (
        f"sounds/0.wav is sampled at 800 Hz, and this model hears {RATE} Hz: "
        f"`ffmpeg -i 0.wav -ar {RATE} OUT.wav` makes such a file"
    )
    floats = (whisper / "1.wav").read_bytes().replace(b"fmt \x10\0\0\0\1\0", b"fmt \x10\0\0\0\3\0")
    (whisper / "0.wav").write_bytes(floats)
    assert read_refusal(*ENCODER, "--audio", "sounds", "-o", "out") == (
        "sounds/0.wav cannot be read: unknown format: 3; integers of 8, 16, 24 or 32 bits are read, and "
        "`ffmpeg -i 0.wav -c:a pcm_s16le OUT.wav` makes such a file"
    )
    (whisper / "0.wav").write_bytes(b"no sound")
    assert read_refusal(*ENCODER, "--audio", "sounds", "-o", "out").startswith("sounds/0.wav cannot be read: ")
    write_sound(whisper / "0.wav", 0)
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (%s,), }"
    numbers = "it holds no array of numbers"
    for array, reason in {
        "0-d": (np.array(1.0), "has features of no axes, and"),
        "1-d": (np.zeros(3), "has features of 3, and"),
        "4-d": (np.zeros((1, 1, MELS, FRAMES)), f"has features of 1 x 1 x {MELS} x {FRAMES}, and"),
        "text": (np.array(["sound"]), f"cannot be read: {numbers}"),
        "complex": (np.zeros((MELS, FRAMES), np.complex64), f"cannot be read: {numbers}"),
        "records": (np.zeros(3, [("a", "f4")]), f"cannot be read: {numbers}"),
        "time": (np.zeros(3, "M8[s]"), f"cannot be read: {numbers}"),
        "object": (np.array([{}], object), "cannot be read: "),
        "large": (header % b"9999999999999", "cannot be read: "),
        "nested": (header % (b"(" * 60), "cannot be read: "),
    }.values():
        np.save(whisper / "3.npy", array) if isinstance(array, np.ndarray) else (whisper / "3.npy").write_bytes(array)
        assert read_refusal(*ENCODER, "--audio", "sounds", "-o", "out").startswith(f"sounds/3.npy {reason}")
    np.savez(whisper / "3.npz", np.zeros(3))
    (whisper / "3.npz").replace(whisper / "3.npy")
    assert read_refusal(*ENCODER, "--audio", "sounds", "-o", "out") == f"sounds/3.npy cannot be read: {numbers}"
    Path("whisper/preprocessor_config.json").unlink()
    assert read_refusal(*ENCODER, "--audio", "sounds", "-o", "out").startswith(
        "whisper: no feature extractor (preprocessor_config.json), which .wav files go through"
    )
