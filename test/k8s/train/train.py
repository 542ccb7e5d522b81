#!/usr/bin/env python3
"""A training loop for images that lie in several places: the same images, and by turns.

One thread trains a small network, as an accelerator would; one worker process of
torch's DataLoader reads ahead of it, as loaders do. An epoch is cut into blocks: each
place's part of a block is trained in turn, in an order of chance, so that whatever else
the machine does hits all places alike. Each place has a network of its own, which sees
the same images in the same order: the weights must come out the same, bit for bit.

What it prints are lines of JSON; the last one says that it is at the end.

    train.py --place local=/local --place claim=/claim [--samples N] [--blocks N] [--epochs N]

A place has files/NNN/NNNNN.bin, a file an image, and shards/shard-NNNN.tar, a thousand
images each. An image is a byte that tells its class and 3 * 32 * 32 bytes of pixels.
"""
import argparse
import hashlib
import json
import os
import random
import tarfile
import time
import zlib

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

SIDE, CLASSES = 32, 10
IMAGE = 1 + 3 * SIDE * SIDE
SHARD = 1000  # images of one
BATCH = 250


def files(place, numbers):
    for n in numbers:
        with open(f"{place}/files/{n // 1000:03d}/{n:05d}.bin", "rb") as f:
            yield n, f.read()


def shards(place, numbers):
    for shard in numbers:
        with tarfile.open(f"{place}/shards/shard-{shard:04d}.tar", "r|") as t:
            for member in t:
                yield int(member.name[: -len(".bin")]), t.extractfile(member).read()


class Batches(IterableDataset):
    """Batches of a part of an epoch, each with a sum over its images' numbers and bytes."""

    def __init__(self, images):
        self.images = images

    def __iter__(self):
        parts, total = [], 0
        for n, image in self.images():
            if len(image) != IMAGE:
                raise ValueError(f"image {n} has {len(image)} bytes")
            parts.append(image)
            total += zlib.crc32(image, n)
            if len(parts) == BATCH:
                yield self.batch(parts), total
                parts, total = [], 0
        if parts:
            yield self.batch(parts), total

    @staticmethod
    def batch(parts):
        return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).view(len(parts), IMAGE)


class Trainer:
    """A network and what it was shown."""

    def __init__(self, width):
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(4 * width * 16, CLASSES),
        )
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.002)
        self.begin_epoch()

    def begin_epoch(self):
        self.samples = self.right = self.sum = 0

    def step(self, batch, total):
        labels = batch[:, 0].long()
        images = batch[:, 1:].float().div_(255).sub_(0.5).view(-1, 3, SIDE, SIDE)
        answers = self.net(images)
        loss = nn.functional.cross_entropy(answers, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.samples += len(labels)
        self.right += int((answers.argmax(1) == labels).sum())
        self.sum += total

    def weights(self):
        digest = hashlib.sha256()
        for p in self.net.parameters():
            digest.update(p.detach().numpy().tobytes())
        return digest.hexdigest()


def block(trainer, images):
    """Trains one; tells how long that took, and for how long of it no batch was there."""
    loader = DataLoader(Batches(images), batch_size=None, num_workers=1, prefetch_factor=4)
    samples, waited = trainer.samples, 0.0
    begin = time.perf_counter()
    batches = iter(loader)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        trainer.step(*batch)
    return {"samples": trainer.samples - samples, "seconds": time.perf_counter() - begin, "waited": waited}


def order(form, samples, epoch):
    """The whole epoch: numbers of images, or of shards."""
    numbers = list(range(samples if form == "files" else samples // SHARD))
    random.Random(epoch).shuffle(numbers)
    return numbers


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--place", action="append", required=True, metavar="NAME=DIR")
    p.add_argument("--samples", type=int, default=50000, help="a multiple of a thousand times the blocks")
    p.add_argument("--blocks", type=int, default=10)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--forms", default="shards,files")
    p.add_argument("--width", type=int, default=20, help="of the network: how long a step takes")
    p.add_argument("--seed", type=int, default=0, help="of the order in which places take turns")
    a = p.parse_args()
    if a.samples % (SHARD * a.blocks):
        p.error("--samples must be a multiple of a thousand times --blocks")
    torch.set_num_threads(1)
    turns = random.Random(a.seed)
    places = dict(place.split("=", 1) for place in a.place)
    say = lambda **what: print(json.dumps(what), flush=True)
    for form in a.forms.split(","):
        read = {"files": files, "shards": shards}[form]
        trainers = {name: Trainer(a.width) for name in places}
        for epoch in range(1, a.epochs + 1):
            numbers = order(form, a.samples, epoch)
            size = len(numbers) // a.blocks
            for t in trainers.values():
                t.begin_epoch()
            for b in range(a.blocks):
                part = numbers[b * size : (b + 1) * size]
                for name in turns.sample(sorted(places), len(places)):
                    took = block(trainers[name], lambda: read(places[name], part))
                    say(form=form, epoch=epoch, block=b, place=name, **took)
            for name, t in trainers.items():
                say(form=form, epoch=epoch, end=name, samples=t.samples, right=t.right, sum=t.sum, weights=t.weights())
    say(done=True)


if __name__ == "__main__":
    main()
