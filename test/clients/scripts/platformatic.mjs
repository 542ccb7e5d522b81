// Cases of @platformatic/kafka. Prints "CASE<tab>passed" or "CASE<tab>why it failed".
import zlib from 'node:zlib'
import { Admin, Producer, Consumer } from '@platformatic/kafka'
const bootstrapBrokers = [process.argv[2]]
const sizes = [0, 1, 1000, 1 << 20]
const value = n => Buffer.from(Array.from({ length: n }, (_, i) => (i * 7 + (i >> 8)) & 255))

const admin = new Admin({ clientId: 'a', bootstrapBrokers })

async function roundtrip(topic, options) {
  await admin.createTopics({ topics: [topic], partitions: 1, replicas: 1 })
  const producer = new Producer({ clientId: 'p', bootstrapBrokers })
  await producer.send({ messages: sizes.map(n => ({ topic, key: Buffer.from('k'), value: value(n), headers: new Map([[Buffer.from('a'), Buffer.from('1')]]) })), acks: -1, ...options })
  await producer.close()
  const consumer = new Consumer({ clientId: 'c', groupId: topic, bootstrapBrokers })
  const stream = await consumer.consume({ topics: [topic], mode: 'earliest', sessionTimeout: 10000, heartbeatInterval: 500, maxBytes: 8 << 20 })
  let i = 0
  for await (const m of stream) {
    if (!value(sizes[i]).equals(m.value)) throw new Error('another value of ' + sizes[i] + ' bytes')
    if (++i === sizes.length) break
  }
  await consumer.close(true)
}

const cases = Object.fromEntries(['none', 'gzip', 'snappy', 'lz4', 'zstd'].map(c => ['plain ' + c, t => roundtrip(t, { compression: c })]))
cases['idempotent'] = t => roundtrip(t, { idempotent: true })
cases['create, delete topic'] = async topic => {
  const [made] = await admin.createTopics({ topics: [topic], partitions: 2, replicas: 1 })
  const known = await admin.metadata({ topics: [topic] })
  if (made.partitions !== 2 || !made.id || known.topics.get(topic).id !== made.id) throw new Error('created ' + JSON.stringify(made) + ', known ' + known.topics.get(topic).id)
  await admin.deleteTopics({ topics: [topic] })
  if ((await admin.listTopics()).includes(topic)) throw new Error('the deleted topic is still listed')
}
cases['DescribeConfigs'] = async topic => {
  await admin.createTopics({ topics: [topic], partitions: 1, replicas: 1, configs: [{ name: 'retention.ms', value: '3600000' }] })
  const [r] = await admin.describeConfigs({ resources: [{ resourceType: 2, resourceName: topic }] })
  if (r.configs.find(c => c.name === 'retention.ms').value !== '3600000') throw new Error('retention.ms is not 3600000')
}
let i = 0
for (const [name, run] of Object.entries(cases)) {
  try {
    await Promise.race([run('platformatic-' + i++), new Promise((_, no) => setTimeout(() => no(new Error('nothing came in 30 s')), 30000))])
    console.log(name + '\tpassed')
  } catch (e) {
    if (name === 'plain zstd' && !zlib.zstdCompressSync) { // Node.js before 22.15
      console.log(name + '\tno codec')
      continue
    }
    console.error(e)
    console.log(name + '\t' + String(e).replaceAll(/\s+/g, ' '))
  }
}
process.exit(0)
