package publish

import (
	"fmt"
	"slices"
	"strings"

	"github.com/parquet-go/parquet-go"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/table/delta"
)

// Formats of a stream's values.
const (
	Bytes = "bytes" // column value: any bytes
	UTF8  = "utf8"  // column value: text
	JSON  = "json"  // column value: JSON as text; with a schema, a column a field
)

// Field is a field of JSON values that becomes a column.
type Field struct {
	Name  string
	Type  string // of the keys of scalars
	Array bool   // an array of the type
}

// scalars are the types of fields, and their form in Parquet.
var scalars = map[string]parquet.Node{
	"string":    parquet.String(),
	"integer":   parquet.Int(32),
	"long":      parquet.Int(64),
	"float":     parquet.Leaf(parquet.FloatType),
	"double":    parquet.Leaf(parquet.DoubleType),
	"boolean":   parquet.Leaf(parquet.BooleanType),
	"binary":    parquet.Leaf(parquet.ByteArrayType),
	"timestamp": parquet.Timestamp(parquet.Microsecond),
}

// maxFields bounds the fields of a schema.
const maxFields = 1000

// ParseSchema parses a schema such as "user:string,score:double,tags:array<string>". Errors:
// Invalid.
func ParseSchema(text string) (fields []Field, err error) {
	bad := func(format string, args ...any) ([]Field, error) {
		return nil, meta.E("read schema", meta.Invalid, text, fmt.Errorf(format, args...))
	}
	names := map[string]bool{"partition": true, "offset": true, "timestamp": true, "key": true, "headers": true}
	for part := range strings.SplitSeq(text, ",") {
		name, typ, ok := strings.Cut(strings.TrimSpace(part), ":")
		if !ok || name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != "" {
			return bad("write name:type,name:type; a name has letters, digits and _")
		}
		if names[strings.ToLower(name)] {
			return bad("a column %s exists already", name)
		}
		names[strings.ToLower(name)] = true
		f := Field{Name: name, Type: strings.TrimSpace(typ)}
		if inner, ok := strings.CutPrefix(f.Type, "array<"); ok && strings.HasSuffix(inner, ">") {
			f.Type, f.Array = strings.TrimSuffix(inner, ">"), true
		}
		if scalars[f.Type] == nil {
			return bad("field %s: type %q is none of string, integer, long, float, double, boolean, binary, timestamp, or array<...> of these", name, typ)
		}
		if fields = append(fields, f); len(fields) > maxFields {
			return bad("it has more than %d fields", maxFields)
		}
	}
	return fields, nil
}

// columns are the columns of a table in both forms: that of the Delta log, and Parquet's.
type columns struct {
	format string
	fields []Field // of JSON values; none: column value
	delta  []delta.Field
	schema *parquet.Schema
	leaves [][]string // paths of the leaves, in the order of the file
}

func newColumns(format string, fields []Field) *columns {
	c := &columns{format: format, fields: fields}
	primitive := func(name, typ string, null bool) {
		c.delta = append(c.delta, delta.Field{Name: name, Type: delta.Type{Primitive: typ}, Null: null})
	}
	root := parquet.Group{
		"partition": scalars["integer"],
		"offset":    scalars["long"],
		"timestamp": parquet.Optional(scalars["timestamp"]),
		"key":       parquet.Optional(scalars["binary"]),
		"headers":   parquet.List(parquet.Group{"name": scalars["string"], "value": parquet.Optional(scalars["binary"])}),
	}
	primitive("partition", "integer", false)
	primitive("offset", "long", false)
	primitive("timestamp", "timestamp", true)
	primitive("key", "binary", true)
	c.delta = append(c.delta, delta.Field{Name: "headers", Type: delta.Type{Element: &delta.Type{Struct: []delta.Field{
		{Name: "name", Type: delta.Type{Primitive: "string"}}, {Name: "value", Type: delta.Type{Primitive: "binary"}, Null: true}}}}})
	if len(fields) == 0 {
		typ := "string"
		if format == Bytes {
			typ = "binary"
		}
		root["value"] = parquet.Optional(scalars[typ])
		primitive("value", typ, true)
	}
	for _, f := range fields {
		if !f.Array {
			root[f.Name] = parquet.Optional(scalars[f.Type])
			primitive(f.Name, f.Type, true)
			continue
		}
		root[f.Name] = parquet.Optional(parquet.List(parquet.Optional(scalars[f.Type])))
		c.delta = append(c.delta, delta.Field{Name: f.Name, Type: delta.Type{Element: &delta.Type{Primitive: f.Type}}, Null: true})
	}
	c.schema = parquet.NewSchema("record", root)
	c.leaves = c.schema.Columns()
	return c
}

// leaf returns the index of a leaf in the order of the file.
func (c *columns) leaf(path ...string) int {
	i := slices.IndexFunc(c.leaves, func(p []string) bool { return slices.Equal(p, path) })
	if i < 0 {
		panic(fmt.Sprintf("publish: no column %v among %v", path, c.leaves))
	}
	return i
}
