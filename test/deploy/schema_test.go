package deploy

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"
)

// TestSchemaKnowsValues: the schema of a chart admits the chart's values, no more and no fewer.
// test/helm tries that helm refuses other values.
func TestSchemaKnowsValues(t *testing.T) {
	for _, c := range charts {
		var values, schema map[string]any
		if err := yaml.Unmarshal(read(t, c.path, "values.yaml"), &values); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(read(t, c.path, "values.schema.json"), &schema); err != nil {
			t.Fatal(err)
		}
		known := 0
		var same func(at string, v any, s map[string]any)
		same = func(at string, v any, s map[string]any) {
			known++
			if items, is := v.([]any); is {
				of, _ := s["items"].(map[string]any)
				if s["type"] != "array" || of == nil {
					t.Errorf("%s%s: the schema has no list: %v", c.path, at, s)
				}
				for _, i := range items {
					if m, is := i.(map[string]any); is && of["properties"] != nil {
						// Entries may leave things out.
						for k, x := range m {
							p, _ := of["properties"].(map[string]any)[k].(map[string]any)
							if p == nil {
								t.Errorf("%s%s[].%s: the schema does not know it", c.path, at, k)
								continue
							}
							same(at+"[]."+k, x, p)
						}
					}
				}
				return
			}
			m, is := v.(map[string]any)
			if !is || s["properties"] == nil { // Kubernetes checks these
				return
			}
			if s["additionalProperties"] != false {
				t.Errorf("%s%s: the schema takes anything", c.path, at)
			}
			p := maps.Clone(s["properties"].(map[string]any))
			if at == "" {
				delete(p, "global") // helm's own
			}
			if have, want := slices.Sorted(maps.Keys(p)), slices.Sorted(maps.Keys(m)); !reflect.DeepEqual(have, want) {
				t.Errorf("%s%s: the schema knows %s, the chart %s", c.path, at, strings.Join(have, " "), strings.Join(want, " "))
				return
			}
			for k, x := range m {
				same(at+"."+k, x, p[k].(map[string]any))
			}
		}
		same("", values, schema)
		if known < 40 {
			t.Errorf("%s: only %d values were looked at", c.path, known)
		}
	}
}
