#!/usr/bin/env python3
"""Trains a model from a stream while the stream grows.

The workers of the DataLoader read the partitions of the stream by Kafka: a partition belongs to one
worker, in the order of its records. The checkpoint has the model, the optimizer, and the offset behind
the last trained record of each partition, in one file that is replaced as a whole. So a job that is
killed goes on at the next record, and each record is in the model once.

    train_stream.py --topic v.samples --checkpoint model.pt --until 2000
    train_stream.py --checkpoint model.pt --table /mnt/penstock/v/.snapshot/s1/samples

The second form trains an epoch over what had arrived when a snapshot was taken: it reads the Parquet
files of the stream's table in the snapshot.

Needs python3-torch and python3-confluent-kafka. The second form needs the module deltalake, or
--reader with a program that prints the rows of a table as lines of JSON. A
value of the stream is a JSON object: n (number of the sample), x (list of numbers), y (number).
"""
import argparse
import itertools
import json
import os
import subprocess
import time

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FEATURES = 4


class Stream(IterableDataset):
    """The records of a topic from given offsets on, as batches: (partition, next offset, samples).

    A batch has at most `batch` samples. A worker without records yields an empty batch after a
    moment, since the DataLoader asks its workers in turn.
    """

    def __init__(self, brokers, topic, offsets, batch):
        self.brokers, self.topic, self.offsets, self.batch = brokers, topic, offsets, batch

    def __iter__(self):
        # Each worker has a connection of its own.
        from confluent_kafka import Consumer, KafkaError, TopicPartition

        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        own = [p for p in sorted(self.offsets) if p % step == first]
        if not own:
            return
        # The job assigns partitions itself and keeps the offsets itself: the group is only a name.
        consumer = Consumer({"bootstrap.servers": self.brokers, "group.id": "training", "enable.auto.commit": False, "auto.offset.reset": "error"})
        consumer.assign([TopicPartition(self.topic, p, self.offsets[p]) for p in own])
        while True:
            batches = {}
            for m in consumer.consume(self.batch, timeout=0.2):
                if m.error() is None:
                    batches.setdefault(m.partition(), []).append(m)
                elif not m.error().retriable() and m.error().code() not in (KafkaError._PARTITION_EOF, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
                    raise RuntimeError(str(m.error()))
            for p, messages in batches.items():
                yield p, messages[-1].offset() + 1, [json.loads(m.value()) for m in messages]
            if not batches:
                yield -1, 0, []


class Job:
    """A model in training, with the place in the stream up to which the model was trained."""

    def __init__(self, path, samples):
        self.path = path
        self.model = torch.nn.Linear(FEATURES, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.offsets = {}
        # How often the model was trained on each sample.
        self.times = torch.zeros(samples, dtype=torch.int32)
        if os.path.exists(path):
            saved = torch.load(path)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.offsets, self.times = saved["offsets"], saved["times"]

    def save(self):
        """Replaces the checkpoint: a crash leaves the old checkpoint or the new one."""
        draft = self.path + ".draft"
        with open(draft, "wb") as f:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "offsets": self.offsets, "times": self.times}, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(draft, self.path)

    def train(self, samples):
        """Trains on samples, and returns the loss before."""
        x = torch.tensor([s["x"] for s in samples], dtype=torch.float32)
        y = torch.tensor([[s["y"]] for s in samples], dtype=torch.float32)
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for s in samples:
            self.times[s["n"]] += 1
        return loss.item()


def table(path, batch, reader):
    """Yields the samples of a stream's table in batches."""
    if reader:
        with subprocess.Popen(reader.split() + [path], stdout=subprocess.PIPE) as p:
            while lines := list(itertools.islice(p.stdout, batch)):
                yield [json.loads(line) for line in lines]
        if p.returncode:
            raise RuntimeError(f"{reader} {path} has failed")
        return
    from deltalake import DeltaTable

    for rows in DeltaTable(path).to_pyarrow_dataset().to_batches(columns=["n", "x", "y"], batch_size=batch):
        if rows.num_rows:
            yield rows.to_pylist()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--brokers", default="127.0.0.1:9092", help="addresses of gateways")
    p.add_argument("--topic", help="topic of the stream")
    p.add_argument("--partitions", type=int, default=4, help="partitions of the stream")
    p.add_argument("--table", help="directory of the stream in a snapshot: train one epoch over its table")
    p.add_argument("--reader", help="program that prints the rows of a table as lines of JSON, in place of the module deltalake")
    p.add_argument("--checkpoint", required=True, help="file of the checkpoint")
    p.add_argument("--every", type=float, default=1, help="seconds between checkpoints")
    p.add_argument("--samples", type=int, default=2000, help="number of different samples")
    p.add_argument("--until", type=int, help="end when the model was trained on so many records")
    p.add_argument("--workers", type=int, default=2, help="workers of the DataLoader")
    p.add_argument("--batch", type=int, default=32, help="samples of a batch, at most")
    a = p.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    job = Job(a.checkpoint, a.samples)
    if a.table:
        before, loss = job.times.clone(), 0.0
        for samples in table(a.table, a.batch, a.reader):
            loss = job.train(samples)
        job.save()
        epoch = job.times - before
        print(json.dumps({"rows": int(epoch.sum()), "once": bool((epoch == 1).all()), "loss": loss}), flush=True)
        return

    for partition in range(a.partitions):
        job.offsets.setdefault(partition, 0)
    begun, loss = int(job.times.sum()), 0.0
    print("go on at the offsets", job.offsets, flush=True)
    stream = DataLoader(Stream(a.brokers, a.topic, dict(job.offsets), a.batch), batch_size=None, num_workers=a.workers)
    saved = time.monotonic()
    for partition, offset, samples in stream:
        if samples:
            loss = job.train(samples)
            job.offsets[partition] = offset  # trained, and so in the next checkpoint
        trained = int(job.times.sum())
        if a.until and trained >= a.until:
            break
        if time.monotonic() - saved >= a.every:
            job.save()
            saved = time.monotonic()
    job.save()
    print(json.dumps({"trained": trained, "before": begun, "once": bool((job.times == 1).all()), "offsets": job.offsets, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
