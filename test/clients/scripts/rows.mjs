// rows.mjs prints the rows of a stream's table as JSON lines, with hyparquet:
//
//	node rows.mjs TABLE
//
// The Delta log names the files of the table: its newest checkpoint, and the commits after the checkpoint.
import { existsSync, readFileSync, readdirSync } from 'node:fs'
import { join } from 'node:path'
import { parquetReadObjects } from 'hyparquet'
import { compressors } from 'hyparquet-compressors'

const table = process.argv[2]
const log = join(table, '_delta_log')
const read = (path, more) => {
  const b = readFileSync(path)
  return parquetReadObjects({ file: b.buffer.slice(b.byteOffset, b.byteOffset + b.byteLength), compressors, ...more })
}
const named = (version) => String(version).padStart(20, '0')

const files = new Set()
let from = ''
const last = join(log, '_last_checkpoint')
if (existsSync(last)) {
  from = named(JSON.parse(readFileSync(last, 'utf8')).version)
  for (const row of await read(join(log, `${from}.checkpoint.parquet`))) if (row.add) files.add(row.add.path)
}
for (const name of readdirSync(log).sort()) {
  if (!/^\d{20}\.json$/.test(name) || name <= `${from}.json`) continue
  for (const line of readFileSync(join(log, name), 'utf8').split('\n').filter(Boolean)) {
    const action = JSON.parse(line)
    if (action.add) files.add(action.add.path)
    if (action.remove) files.delete(action.remove.path)
  }
}
for (const path of files) {
  for (const row of await read(join(table, decodeURIComponent(path)), { columns: ['n', 'x', 'y'] })) {
    console.log(JSON.stringify(row, (_, v) => (typeof v === 'bigint' ? Number(v) : v)))
  }
}
