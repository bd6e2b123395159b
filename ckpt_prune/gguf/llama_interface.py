"""llama.cpp's own interface for models with an encoder and a decoder, which its server does not run.

The package xllamacpp holds llama.cpp, and its functions can be called by their names in C. Settings of a context are a
structure that gets new fields from version to version, so that fields are found by the defaults beside them.
"""

import ctypes
import struct
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

_ROOM = 512
"""Bytes for a structure of settings, which is smaller."""
_LANDMARK = struct.pack("<4i6fIf", -1, -1, -1, -1, 0, 0, -1, -1, -1, -1, 0, -1)
"""Defaults of settings of a context: kinds of rotary scaling, pooling, attention and flash attention, then of rotary
positions and of the cache."""
_FLASH_ATTENTION = 12
"""Bytes from there to whether flash attention is used."""
_DEVICE_BLOCKS = 16
"""Bytes from the beginning of a model's settings to how many of its blocks are on other devices: -1, all."""


class _Settings(ctypes.Structure):
    _fields_: ClassVar = [("bytes", ctypes.c_ubyte * _ROOM)]


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_ERROR = 4


def _log_errors(level: int, text: bytes, _data: Any) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class _Batch(ctypes.Structure):
    _fields_: ClassVar = [("count", ctypes.c_int32)] + [(f"pointer{place}", ctypes.c_void_p) for place in range(6)]


class EncoderDecoder:
    """A file with an encoder and a decoder, on a CPU, with a cache in float32 and attention in the plain order.

    Raises:
        RuntimeError: the file cannot be loaded, or the interface is not as it was.
    """

    def __init__(self, model: str, *, context: int, threads: int) -> None:
        spec = find_spec("xllamacpp.xllamacpp")
        assert spec is not None
        self._library = library = ctypes.CDLL(str(spec.origin))
        self._log = _LOG(_log_errors)  # llama.cpp calls it as long as this lives
        library.llama_log_set(self._log, None)
        library.llama_backend_init()
        pointer, floats = ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)
        returned: dict[str, Any] = {
            "model_load_from_file": (pointer, ctypes.c_char_p, _Settings),
            "init_from_model": (pointer, pointer, _Settings),
            "model_get_vocab": (pointer, pointer),
            "get_memory": (pointer, pointer),
            "model_default_params": (_Settings,),
            "context_default_params": (_Settings,),
            "batch_get_one": (_Batch, pointer, ctypes.c_int32),
            "get_embeddings": (floats, pointer),
            "get_logits_ith": (floats, pointer, ctypes.c_int32),
            "encode": (ctypes.c_int32, pointer, _Batch),
            "decode": (ctypes.c_int32, pointer, _Batch),
            "memory_clear": (None, pointer, ctypes.c_bool),
            "set_n_threads": (None, pointer, ctypes.c_int32, ctypes.c_int32),
            "set_embeddings": (None, pointer, ctypes.c_bool),
            "vocab_is_eog": (ctypes.c_bool, pointer, ctypes.c_int32),
            "vocab_n_tokens": (ctypes.c_int32, pointer),
            "model_n_embd": (ctypes.c_int32, pointer),
            "tokenize": (
                *(ctypes.c_int32, pointer, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32),
                *(ctypes.c_bool, ctypes.c_bool),
            ),
        }
        for name, (result, *arguments) in returned.items():
            function = getattr(library, f"llama_{name}")
            function.restype, function.argtypes = result, arguments
        self._model = library.llama_model_load_from_file(Path(model).as_posix().encode(), self._of_model())
        if not self._model:
            raise RuntimeError("error: llama.cpp does not load the file")
        self._context = library.llama_init_from_model(self._model, self._of_context(context))
        if not self._context:
            raise RuntimeError("error: llama.cpp makes no context for the file")
        library.llama_set_n_threads(self._context, threads, threads)
        library.llama_set_embeddings(self._context, True)
        self._vocabulary = library.llama_model_get_vocab(self._model)
        self._tokens = library.llama_vocab_n_tokens(self._vocabulary)
        self._width = library.llama_model_n_embd(self._model)

    def _of_model(self) -> _Settings:
        settings = bytearray(bytes(self._library.llama_model_default_params().bytes))
        struct.pack_into("<i", settings, _DEVICE_BLOCKS, 0)
        return _Settings.from_buffer(settings)

    def _of_context(self, tokens: int) -> _Settings:
        settings = bytearray(bytes(self._library.llama_context_default_params().bytes))
        place = settings.find(_LANDMARK)
        types = -(-(place + len(_LANDMARK)) // 8) * 8 + 16  # behind two pointers
        if place < 0 or struct.unpack_from("<2i", settings, types) != (1, 1):
            raise RuntimeError("error: this version of xllamacpp has settings of another form")
        struct.pack_into("<3I", settings, 0, tokens, tokens, tokens)  # of the context, of a batch, of what runs at once
        struct.pack_into("<i", settings, place + _FLASH_ATTENTION, 0)
        struct.pack_into("<2i", settings, types, 0, 0)  # float32 for keys and values
        return _Settings.from_buffer(settings)

    def split(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the file puts around it."""
        stored = text.encode()
        ids = (ctypes.c_int32 * (len(stored) + 8))()
        count = self._library.llama_tokenize(self._vocabulary, stored, len(stored), ids, len(ids), True, True)
        return list(ids[:count])

    def ends(self, token: int) -> bool:
        """Return whether a text ends at a token."""
        return bool(self._library.llama_vocab_is_eog(self._vocabulary, token))

    def encode(self, source: Sequence[int]) -> "np.ndarray[Any, Any]":
        """Return the last hidden states of a source, (tokens, hidden) float32, and keep them for `decode`."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        self._run("encode", source)
        found = self._library.llama_get_embeddings(self._context)
        return np.ctypeslib.as_array(found, (len(source), self._width)).copy()

    def decode(self, target: Sequence[int]) -> Iterator["np.ndarray[Any, Any]"]:
        """Yield the logits behind each token of a target, which are read one by one: (tokens,) float32."""
        for token in target:
            self._run("decode", [token])
            yield np.ctypeslib.as_array(self._library.llama_get_logits_ith(self._context, -1), (self._tokens,)).copy()

    def _run(self, what: str, tokens: Sequence[int]) -> None:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        function = getattr(self._library, f"llama_{what}")
        code = function(self._context, self._library.llama_batch_get_one(ids, len(ids)))
        if code:
            raise RuntimeError(f"error: llama_{what} returned {code}")
