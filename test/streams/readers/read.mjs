// read.mjs prints the rows of a published table as JSON lines:
//
//   node read.mjs chdb|duckdb|hyparquet TABLE FILE...
//
// The working directory must be TABLE. chdb (ClickHouse) reads the Delta log itself. DuckDB and hyparquet get the table's files.
import { readFileSync } from 'node:fs'
import { join } from 'node:path'

const [reader, table, ...files] = process.argv.slice(2)
const columns = 'partition, "offset", n, name'
const print = (r) => console.log(JSON.stringify({ partition: Number(r.partition), offset: Number(r.offset), n: Number(r.n), name: r.name }))

switch (reader) {
  case 'chdb': {
    const { query } = await import('chdb')
    process.stdout.write(String(query(`SELECT partition, offset, n, name FROM deltaLakeLocal('${table}') FORMAT JSONEachRow SETTINGS output_format_json_quote_64bit_integers = 0`)))
    break
  }
  case 'duckdb': {
    const { DuckDBInstance } = await import('@duckdb/node-api')
    const c = await (await DuckDBInstance.create(':memory:')).connect()
    const list = files.map((f) => `'${join(table, f)}'`).join(', ')
    const r = await c.runAndReadAll(`SELECT ${columns} FROM read_parquet([${list}], hive_partitioning = false)`)
    r.getRowObjects().forEach(print)
    break
  }
  case 'hyparquet': {
    const { parquetReadObjects } = await import('hyparquet')
    const { compressors } = await import('hyparquet-compressors')
    for (const f of files) {
      const b = readFileSync(join(table, f))
      const file = b.buffer.slice(b.byteOffset, b.byteOffset + b.byteLength)
      for (const r of await parquetReadObjects({ file, compressors, columns: ['partition', 'offset', 'n', 'name'] })) print(r)
    }
    break
  }
  default:
    throw new Error(`no reader ${reader}`)
}
