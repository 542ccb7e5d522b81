package delta

import "encoding/json"

// Field is a column of a table, or a part of a column.
type Field struct {
	Name string
	Type Type
	// Null says that the column may have no value.
	Null bool
}

// Type is the type of a column. Exactly one field is set.
type Type struct {
	Primitive string // string, long, integer, float, double, boolean, binary, timestamp
	Element   *Type  // of an array, whose elements may be null
	Struct    []Field
}

// MarshalJSON writes the type as the protocol's schema has it.
func (t Type) MarshalJSON() ([]byte, error) {
	switch {
	case t.Element != nil:
		return json.Marshal(map[string]any{"type": "array", "elementType": *t.Element, "containsNull": true})
	case t.Struct != nil:
		fields := make([]map[string]any, 0, len(t.Struct))
		for _, f := range t.Struct {
			fields = append(fields, map[string]any{"name": f.Name, "type": f.Type, "nullable": f.Null, "metadata": map[string]any{}})
		}
		return json.Marshal(map[string]any{"type": "struct", "fields": fields})
	default:
		return json.Marshal(t.Primitive)
	}
}

// Begin returns the first actions of a table with columns: protocol and metadata. id must be
// unique among tables, created is in ms since 1970. Rows are never taken out of the table.
func Begin(id string, created int64, columns []Field) []Action {
	schema, err := json.Marshal(Type{Struct: columns})
	if err != nil {
		panic("delta: a schema of plain values can't be encoded: " + err.Error())
	}
	return []Action{
		{Protocol: &Protocol{MinReader: readerVersion, MinWriter: writerVersion}},
		{Metadata: &Metadata{ID: id, Format: Format{Provider: "parquet", Options: map[string]string{}}, Schema: string(schema),
			PartitionColumns: []string{}, Configuration: map[string]string{"delta.appendOnly": "true"}, Created: created}},
	}
}
