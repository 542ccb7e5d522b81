# Cases of python3-confluent-kafka. Prints "CASE<tab>passed" or "CASE<tab>why it failed".
import sys, time, traceback
from confluent_kafka import Producer, Consumer, TopicPartition, KafkaException, OFFSET_BEGINNING
from confluent_kafka.admin import AdminClient, NewTopic, ConfigResource

addr = sys.argv[1]
sizes = [0, 1, 1000, 1 << 20]
base = {"bootstrap.servers": addr, "message.max.bytes": 4 << 20}
admin = AdminClient({"bootstrap.servers": addr})


def value(n):
    return bytes((i * 7 + (i >> 8)) & 255 for i in range(n))


def create(topic, partitions=1):
    for f in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
        f.result(60)


def produce(topic, values, conf={}, **kw):
    errors = []
    p = Producer({**base, **conf})
    for v in values:
        p.produce(topic, value=v, on_delivery=lambda e, m: errors.append(e) if e else None, **kw)
    assert p.flush(60) == 0, "not all was delivered"
    assert not errors, errors


def read(c, n):
    out, end = [], time.time() + 60
    while len(out) < n and time.time() < end:
        m = c.poll(1)
        if m is None:
            continue
        assert not m.error(), m.error()
        out.append(m)
    assert len(out) == n, "%d of %d records came" % (len(out), n)
    return out


def consumer(group, **conf):
    return Consumer({**base, "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False, **conf})


def from_start(topic, n):
    c = consumer("none")
    c.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    try:
        return read(c, n)
    finally:
        c.close()


def roundtrip(topic, conf):
    create(topic)
    produce(topic, [value(n) for n in sizes], conf)
    got = [m.value() for m in from_start(topic, len(sizes))]
    assert [g or b"" for g in got] == [value(n) for n in sizes], "other values"


def headers(topic):
    create(topic)
    produce(topic, [b"x"], key=b"k", headers=[("a", b"1"), ("b", b"")])
    m = from_start(topic, 1)[0]
    assert m.key() == b"k" and m.headers() == [("a", b"1"), ("b", b"")], m.headers()


def group(topic):
    create(topic, 2)
    for p in (0, 1):
        produce(topic, [b"x"] * 5, partition=p)
    c = consumer(topic)
    c.subscribe([topic])
    read(c, 10)
    c.commit(asynchronous=False)
    c.close()
    produce(topic, [b"y"], partition=1)
    c = consumer(topic)
    c.subscribe([topic])
    assert read(c, 1)[0].value() == b"y"
    c.close()


def rebalance(topic, **conf):
    create(topic, 4)
    a = consumer(topic, **{k: v + "-a" for k, v in conf.items()})
    b = consumer(topic, **{k: v + "-b" for k, v in conf.items()})
    a.subscribe([topic])
    wait(lambda: (a.poll(0.2), len(a.assignment()))[1] == 4, "one member has all")
    b.subscribe([topic])
    wait(lambda: (a.poll(0.2), b.poll(0.2), (len(a.assignment()), len(b.assignment())))[2] == (2, 2), "two members have two each")
    b.close()
    wait(lambda: (a.poll(0.2), len(a.assignment()))[1] == 4, "the member has all again") if not conf else None
    a.close()


def wait(done, what):
    end = time.time() + 60
    while not done():
        assert time.time() < end, what + ": did not happen"


def by_time(topic):
    create(topic)
    for i in range(10):
        produce(topic, [b"%d" % i], timestamp=1000000 + 1000 * i)
    produce(topic, [b"%d" % i for i in range(10)], {"compression.type": "gzip", "linger.ms": 200}, timestamp=2000000)
    c = consumer("none")
    for at, want in ((1000000, 0), (1004500, 5), (2000000, 10)):
        got = c.offsets_for_times([TopicPartition(topic, 0, at)], 60)[0].offset
        assert got == want, "%d: %d, not %d" % (at, got, want)
    c.close()


def reset(topic):
    create(topic)
    produce(topic, [b"x"] * 3)
    c = consumer(topic)
    c.assign([TopicPartition(topic, 0, 1000)])
    assert read(c, 3)[0].offset() == 0
    c.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
    assert c.committed([TopicPartition(topic, 0)], 60)[0].offset == 1
    c.close()


def transaction(topic):
    p = Producer({**base, "transactional.id": "t"})
    try:
        p.init_transactions(20)
    except KafkaException as e:
        assert e.args[0].name() in ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED",), e
        return
    raise Exception("it was not refused")


def configs(topic):
    create(topic)
    r = ConfigResource(ConfigResource.Type.TOPIC, topic)
    for f in admin.describe_configs([r]).values():
        assert f.result(60)["cleanup.policy"].value == "delete"


def topics(topic):
    create(topic)
    assert topic in admin.list_topics(timeout=60).topics
    for f in admin.delete_topics([topic], operation_timeout=30).values():
        f.result(60)
    assert topic not in admin.list_topics(timeout=60).topics


cases = [("plain " + c, lambda t, c=c: roundtrip(t, {"compression.type": c})) for c in ("none", "gzip", "snappy", "lz4", "zstd")] + [
    ("idempotent", lambda t: roundtrip(t, {"enable.idempotence": True})),
    ("headers", headers), ("group, commit", group), ("rebalance", rebalance),
    ("static members", lambda t: rebalance(t, **{"group.instance.id": "m"})),
    ("lookup by time", by_time), ("reset of offsets", reset), ("create, delete topic", topics),
    ("DescribeConfigs", configs), ("transaction refused", transaction),
]
for i, (name, run) in enumerate(cases):
    try:
        run("cp-%d" % i)
        print(name + "\tpassed", flush=True)
    except Exception as e:
        traceback.print_exc()
        print(name + "\t" + repr(e).replace("\n", " "), flush=True)
