"""The token sources of src/data and the generator of src/core/philox.h, number for number: both programs of a
comparison then train on the same sequences."""

import glob
import os

import numpy as np

RANDOM_TOKENS, SHUFFLE = 0x746F6B656E730000, 0x73687566666C6500  # Purpose in src/data/token_source.cpp
FEISTEL_ROUNDS = 6
MASK32 = np.uint64(0xFFFFFFFF)


def philox(seed, stream, counters):
    """Philox4x32-10: the four words [4, …] of each counter, uint64 arrays of 32-bit values."""
    counters = np.asarray(counters, dtype=np.uint64)
    shift = np.uint64(32)
    c0, c1 = counters & MASK32, counters >> shift
    c2 = np.full_like(c0, np.uint64(stream & 0xFFFFFFFF))
    c3 = np.full_like(c0, np.uint64(stream >> 32))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & MASK32
        c2, c3 = (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3))


def derived_key(seed, purpose, number):
    words = philox(seed, purpose, [number])[:, 0]
    return int(words[1]) << 32 | int(words[0])


def permute(index, count, key):
    """src/data/permutation.h: the image of `index` under the permutation of [0, count) that `key` chooses."""
    half_bits = ((count - 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    value = index
    while True:
        left, right = value >> half_bits, value & mask
        for round_ in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (int(philox(key, round_, [right])[0, 0]) & mask)
        value = left << half_bits | right
        if value < count:
            return value


class RandomTokens:
    def __init__(self, config):
        self._vocab_size = np.uint64(config["model"]["vocab_size"])
        self._length = config["train"]["seq_len"]
        self._key = derived_key(config["train"]["seed"], RANDOM_TOKENS, 0)

    def read(self, sample):
        words = philox(self._key, sample, np.arange(self._length, dtype=np.uint64))
        tokens, targets = (words[:2] * self._vocab_size >> np.uint64(32)).astype(np.int64)
        return tokens, targets


class TextTokens:
    def __init__(self, config):
        self._length, self._seed = config["train"]["seq_len"], config["train"]["seed"]
        pattern = config["data"]["path"]
        paths = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern), key=os.fsencode)
        self._bytes = np.concatenate([np.fromfile(path, dtype=np.uint8) for path in paths if os.path.isfile(path)])
        self._windows = (len(self._bytes) - 1) // self._length

    def read(self, sample):
        epoch, position = divmod(sample, self._windows)
        first = permute(position, self._windows, derived_key(self._seed, SHUFFLE, epoch)) * self._length
        window = self._bytes[first : first + self._length + 1].astype(np.int64)
        return window[:-1], window[1:]


def make_source(config):
    return {"random": RandomTokens, "text": TextTokens}[config["data"]["source"]](config)


def read_batch(source, step, world, rank, batch):
    """(tokens, targets) [batch, T] of a rank's step, as read_batch() of src/data/token_source.h."""
    first = (step * world + rank) * batch
    tokens, targets = zip(*(source.read(first + b) for b in range(batch)))
    return np.stack(tokens), np.stack(targets)
