# Cases of python3-kafka. Prints "CASE<tab>passed" or "CASE<tab>why it failed".
import sys, time, traceback
from kafka import KafkaProducer, KafkaConsumer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic, ConfigResource, ConfigResourceType
from kafka.structs import OffsetAndMetadata

addr = sys.argv[1]
sizes = [0, 1, 1000, 1 << 20]
admin = KafkaAdminClient(bootstrap_servers=addr)


def value(n):
    return bytes((i * 7 + (i >> 8)) & 255 for i in range(n))


def create(topic, partitions=1):
    admin.create_topics([NewTopic(topic, partitions, 1)], timeout_ms=60000)


def produce(topic, values, conf={}, **kw):
    p = KafkaProducer(bootstrap_servers=addr, max_request_size=4 << 20, acks="all", **conf)
    for f in [p.send(topic, v, **kw) for v in values]:
        f.get(60)
    p.close()


def consumer(group=None):
    return KafkaConsumer(bootstrap_servers=addr, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False, heartbeat_interval_ms=500)


def read(c, n):
    out, end = [], time.time() + 60
    while len(out) < n and time.time() < end:
        for l in c.poll(500).values():
            out += l
    assert len(out) == n, "%d of %d records came" % (len(out), n)
    return out


def from_start(topic, n):
    c = consumer()
    c.assign([TopicPartition(topic, 0)])
    c.seek_to_beginning()
    out = read(c, n)
    c.close()
    return out


def roundtrip(topic, codec):
    create(topic)
    produce(topic, [value(n) for n in sizes], {"compression_type": codec})
    assert [m.value or b"" for m in from_start(topic, len(sizes))] == [value(n) for n in sizes], "other values"


def headers(topic):
    create(topic)
    produce(topic, [b"x"], key=b"k", headers=[("a", b"1"), ("b", b"")])
    m = from_start(topic, 1)[0]
    assert m.key == b"k" and m.headers == [("a", b"1"), ("b", b"")], m.headers


def group(topic):
    create(topic, 2)
    for p in (0, 1):
        produce(topic, [b"x"] * 5, partition=p)
    c = consumer(topic)
    c.subscribe([topic])
    read(c, 10)
    c.commit()
    c.close()
    produce(topic, [b"y"], partition=1)
    c = consumer(topic)
    c.subscribe([topic])
    assert read(c, 1)[0].value == b"y"
    c.close()


def wait(done, what):
    end = time.time() + 60
    while not done():
        assert time.time() < end, what + ": did not happen"


def rebalance(topic):
    create(topic, 4)
    a, b = consumer(topic), consumer(topic)
    a.subscribe([topic])
    wait(lambda: (a.poll(200), len(a.assignment()))[1] == 4, "one member has all")
    b.subscribe([topic])
    # A poll waits for the whole rebalance, so that the other member polls in a thread.
    import threading
    stop = threading.Event()

    def poll():
        while not stop.is_set():
            a.poll(200)
    th = threading.Thread(target=poll)
    th.start()
    try:
        wait(lambda: (b.poll(200), len(b.assignment()))[1] == 2, "two members have two each")
    finally:
        stop.set()
        th.join()
    b.close()
    wait(lambda: (a.poll(200), len(a.assignment()))[1] == 4, "the member has all again")
    a.close()


def by_time(topic):
    create(topic)
    for i in range(10):
        produce(topic, [b"%d" % i], timestamp_ms=1000000 + 1000 * i)
    c = consumer()
    for at, want in ((1000000, 0), (1004500, 5)):
        got = c.offsets_for_times({TopicPartition(topic, 0): at})[TopicPartition(topic, 0)].offset
        assert got == want, "%d: %d, not %d" % (at, got, want)
    c.close()


def reset(topic):
    create(topic)
    produce(topic, [b"x"] * 3)
    c, p = consumer(topic), TopicPartition(topic, 0)
    c.assign([p])
    c.seek(p, 1000)
    assert read(c, 3)[0].offset == 0
    c.commit({p: OffsetAndMetadata(1, "")})
    assert c.committed(p) == 1
    c.close()


def configs(topic):
    create(topic)
    r = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    assert "cleanup.policy" in str(r), r


def topics(topic):
    create(topic)
    assert topic in admin.list_topics()
    admin.delete_topics([topic])
    assert topic not in admin.list_topics()


cases = [("plain " + (c or "none"), lambda t, c=c: roundtrip(t, c)) for c in (None, "gzip", "snappy", "lz4", "zstd")] + [
    ("headers", headers), ("group, commit", group), ("rebalance", rebalance), ("lookup by time", by_time),
    ("reset of offsets", reset), ("create, delete topic", topics), ("DescribeConfigs", configs),
]
for i, (name, run) in enumerate(cases):
    try:
        run("kp-%d" % i)
        print(name + "\tpassed", flush=True)
    except AssertionError as e:
        # The codecs snappy, lz4 and zstd need packages of Python that are not installed.
        if "Libraries for" in str(e):
            print(name + "\tno codec", flush=True)
            continue
        traceback.print_exc()
        print(name + "\t" + repr(e).replace("\n", " "), flush=True)
    except Exception as e:
        traceback.print_exc()
        print(name + "\t" + repr(e).replace("\n", " "), flush=True)
