package cluster

import (
	"reflect"
	"testing"
)

// fill sets every field of a value to a non-zero value.
func fill(t *testing.T, v reflect.Value) {
	t.Helper()
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString("set")
	case reflect.Int, reflect.Int64:
		v.SetInt(7)
	case reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(7)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(t, v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, key)
		fill(t, value)
		v.SetMapIndex(key, value)
	default:
		t.Fatalf("a %v: say here what is not zero in it", v.Type())
	}
}

// TestCloneTakesEverySetting walks over all fields of a row: a table decides for each
// whether a clone begins with it, and the clone must agree.
func TestCloneTakesEverySetting(t *testing.T) {
	var origin Volume
	row := reflect.ValueOf(&origin).Elem()
	fill(t, row)
	clone := CloneRow("clone", origin.Policy, 9, Origin{Volume: origin.ID + 1}, &origin, origin.Labels)
	got := reflect.ValueOf(clone)
	for i := range row.NumField() {
		name := row.Type().Field(i).Name
		same := reflect.DeepEqual(row.Field(i).Interface(), got.Field(i).Interface())
		if name == "Advisory" {
			// A clone does not take the time since when the origin is above its limits.
			limits := Advisory{Bytes: origin.Advisory.Bytes, Inodes: origin.Advisory.Inodes}
			same = clone.Advisory != nil && *clone.Advisory == limits
		}
		switch fieldsOfRow[name] {
		case copied:
			if !same {
				t.Errorf("a clone does not begin with its origin's %s: %v, not %v", name, got.Field(i), row.Field(i))
			}
		case own:
			if same {
				t.Errorf("a clone has its origin's %s, %v, which is to be its own", name, got.Field(i))
			}
		default:
			t.Errorf("nobody decided whether a clone begins with its origin's %s: say so in fieldsOfRow", name)
		}
	}
	for name := range fieldsOfRow {
		if _, ok := row.Type().FieldByName(name); !ok {
			t.Errorf("fieldsOfRow names %s, which a row has not", name)
		}
	}
	// The copies share no memory that a change would touch.
	if clone.Advisory == origin.Advisory {
		t.Error("clone and origin share one advisory quota")
	}
}
