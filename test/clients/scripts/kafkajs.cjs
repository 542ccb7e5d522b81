// Cases of kafkajs. Prints "CASE<tab>passed" or "CASE<tab>why it failed".
const { Kafka, CompressionTypes, logLevel, ConfigResourceTypes } = require('kafkajs')
const kafka = new Kafka({ clientId: 'cases', brokers: [process.argv[2]], logLevel: logLevel.NOTHING })
const sizes = [0, 1, 1000, 1 << 20]
const value = n => Buffer.from(Array.from({ length: n }, (_, i) => (i * 7 + (i >> 8)) & 255))
const admin = kafka.admin()
const check = (ok, what) => { if (!ok) throw new Error(what) }
const sleep = ms => new Promise(r => setTimeout(r, ms))
async function until(done, what) {
  for (const end = Date.now() + 60000; !(await done());) {
    check(Date.now() < end, what + ': did not happen')
    await sleep(100)
  }
}
const create = (topic, numPartitions = 1) => admin.createTopics({ topics: [{ topic, numPartitions, replicationFactor: 1 }], waitForLeaders: true })

async function produce(topic, messages, conf = {}, compression) {
  const p = kafka.producer(conf)
  await p.connect()
  await p.send({ topic, messages, compression, acks: -1 })
  await p.disconnect()
}

async function member(groupId, topic, got = []) {
  const c = kafka.consumer({ groupId, heartbeatInterval: 500, sessionTimeout: 10000 })
  await c.connect()
  await c.subscribe({ topics: [topic], fromBeginning: true })
  c.parts = []
  c.on(c.events.GROUP_JOIN, e => { c.parts = e.payload.memberAssignment[topic] || [] })
  await c.run({ eachMessage: async ({ message }) => { got.push(message) } })
  return c
}

async function read(groupId, topic, n) {
  const got = []
  const c = await member(groupId, topic, got)
  await until(() => got.length >= n, n + ' records came')
  await c.disconnect() // commits
  check(got.length === n, got.length + ' records, not ' + n)
  return got
}

const cases = {}
const roundtrip = (conf, codec) => async t => {
  await create(t)
  await produce(t, sizes.map(n => ({ value: value(n) })), conf, codec)
  const got = await read(t, t, sizes.length)
  sizes.forEach((n, i) => check(value(n).equals(got[i].value), 'another value of ' + n + ' bytes'))
}
cases['plain none'] = roundtrip({})
cases['plain gzip'] = roundtrip({}, CompressionTypes.GZIP)
cases['idempotent'] = roundtrip({ idempotent: true, maxInFlightRequests: 1 })
cases['headers'] = async t => {
  await create(t)
  await produce(t, [{ key: 'k', value: 'x', headers: { a: '1', b: '' } }])
  const [m] = await read(t, t, 1)
  check(m.key.toString() === 'k' && m.headers.a.toString() === '1' && m.headers.b.toString() === '', 'other headers')
}
cases['group, commit'] = async t => {
  await create(t, 2)
  await produce(t, [0, 1].flatMap(partition => Array.from({ length: 5 }, () => ({ value: 'x', partition }))))
  await read(t, t, 10)
  await produce(t, [{ value: 'y', partition: 1 }])
  check((await read(t, t, 1))[0].value.toString() === 'y', 'another record')
}
cases['rebalance'] = async t => {
  await create(t, 4)
  const a = await member(t, t)
  await until(() => a.parts.length === 4, 'one member has all')
  const b = await member(t, t)
  await until(() => a.parts.length === 2 && b.parts.length === 2, 'two members have two each')
  await b.disconnect()
  await until(() => a.parts.length === 4, 'the member has all again')
  await a.disconnect()
}
cases['lookup by time'] = async t => {
  await create(t)
  for (let i = 0; i < 10; i++) await produce(t, [{ value: '' + i, timestamp: '' + (1000000 + 1000 * i) }])
  const at = (await admin.fetchTopicOffsetsByTimestamp(t, 1004500))[0].offset
  check(at === '5', 'offset ' + at)
}
cases['reset of offsets'] = async t => {
  await create(t)
  await produce(t, [{ value: 'a' }, { value: 'b' }])
  await read(t, t, 2)
  await admin.setOffsets({ groupId: t, topic: t, partitions: [{ partition: 0, offset: '1' }] })
  check((await read(t, t, 1))[0].value.toString() === 'b', 'another record')
}
cases['create, delete topic'] = async t => {
  await create(t)
  check((await admin.listTopics()).includes(t), 'it is not listed')
  await admin.deleteTopics({ topics: [t] })
  check(!(await admin.listTopics()).includes(t), 'it is still listed')
}
cases['DescribeConfigs'] = async t => {
  await create(t)
  const r = await admin.describeConfigs({ resources: [{ type: ConfigResourceTypes.TOPIC, name: t }] })
  check(r.resources[0].configEntries.some(e => e.configName === 'cleanup.policy'), 'no cleanup.policy')
}
cases['transaction refused'] = async t => {
  const p = kafka.producer({ transactionalId: t, idempotent: true, maxInFlightRequests: 1, retry: { retries: 1 } })
  let refused
  try { await p.connect(); await p.transaction() } catch (e) { refused = e }
  await p.disconnect()
  // kafkajs does not show the server's error 53, but says that it found no coordinator.
  check(refused && refused.name === 'KafkaJSGroupCoordinatorNotFound', 'it was not refused: ' + refused)
}

;(async () => {
  await admin.connect()
  let i = 0
  for (const [name, run] of Object.entries(cases)) {
    try {
      await run('kafkajs-' + i++)
      console.log(name + '\tpassed')
    } catch (e) {
      console.error(e)
      console.log(name + '\t' + String(e).replaceAll(/\s+/g, ' '))
    }
  }
  await admin.disconnect()
  process.exit(0)
})()
