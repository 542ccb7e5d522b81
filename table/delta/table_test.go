package delta

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"sync"
	"testing"

	"penstock.io/penstock/meta"
)

var columns = []Field{
	{Name: "offset", Type: Type{Primitive: "long"}},
	{Name: "value", Type: Type{Primitive: "binary"}, Null: true},
	{Name: "headers", Type: Type{Element: &Type{Struct: []Field{{Name: "name", Type: Type{Primitive: "string"}}}}}, Null: true},
}

// open opens a table that has checkpoints often.
func open(dir Dir) (*Table, error) {
	t, err := Open(context.Background(), dir)
	if err == nil {
		t.every, t.keep = 10, 30
		t.unsafeNoNewest = os.Getenv("PENSTOCK_CONTROL") == "table-nonewest"
	}
	return t, err
}

// publish commits the file of an application's next step, unless the application is at
// the step already.
func publish(t *Table, app string, step int64) error {
	return t.Commit(context.Background(), func(s *State) ([]Action, error) {
		if s.Done(app) >= step {
			return nil, nil
		}
		var all []Action
		if s.Version < 0 {
			all = Begin("id", 1, columns)
		}
		return append(all, Action{Txn: &Txn{App: app, Version: step, Updated: 1}},
			Action{Add: &Add{Path: fmt.Sprintf("data/%s=/%d.parquet", app, step), PartitionValues: map[string]string{}, Size: step, DataChange: true, Stats: `{"numRecords":1}`}}), nil
	})
}

// join commits the replacement of all small files of an application by a file.
func join(t *Table, app string) error {
	return t.Commit(context.Background(), func(s *State) ([]Action, error) {
		var all []Action
		sum := int64(0)
		for step := range s.Done(app) + 1 {
			p := fmt.Sprintf("data/%s=/%d.parquet", app, step)
			if f := s.Files[p]; f != nil {
				all = append(all, Action{Remove: &Remove{Path: p, Deleted: 1}})
				sum += f.Size
			}
		}
		if len(all) < 4 {
			return nil, nil
		}
		return append(all, Action{Add: &Add{Path: fmt.Sprintf("data/%s=/joined-%d.parquet", app, s.Version), Size: sum, DataChange: false}}), nil
	})
}

// sum is the sum of the sizes of all files, which is the sum of all steps.
func sum(s *State) (n int64) {
	for _, f := range s.Files {
		n += f.Size
	}
	return n
}

// TestCrashes crashes a writer at each change of the directory; the next writer goes on. Each
// step must be in the table once.
func TestCrashes(t *testing.T) {
	const steps, most = 30, 80
	for _, done := range []bool{false, true} {
		for left := 0; left < most; left++ {
			d := newMemDir()
			d.left, d.done = left, done
			for lives := 0; ; lives++ {
				if lives > 3 {
					t.Fatalf("DATA: a crash after %d changes: the writer does not go on", left)
				}
				err := work(d, steps)
				if err == nil {
					break
				}
				if !errors.Is(err, errCrash) {
					t.Fatalf("DATA: after a crash at change %d: %v", left, err)
				}
				d = d.restart()
			}
			again, err := open(d)
			if err != nil {
				t.Fatal(err)
			}
			if got := sum(again.State()); got != steps*(steps+1)/2 || again.State().Done("a") != steps {
				t.Fatalf("DATA: after a crash at change %d the table has the sum %d at step %d, want %d", left, got, again.State().Done("a"), steps*(steps+1)/2)
			}
			if err := again.State().Check(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func work(d *memDir, steps int64) error {
	t, err := open(d)
	if err != nil {
		return err
	}
	for step := max(1, t.State().Done("a")+1); step <= steps; step++ {
		if err := publish(t, "a", step); err != nil {
			return err
		}
		if step%5 == 0 {
			if err := join(t, "a"); err != nil {
				return err
			}
		}
		if err := t.Checkpoint(context.Background(), 10, 5); err != nil {
			return err
		}
	}
	return nil
}

// TestWriters: writers of the same table and of the same steps commit each step once.
func TestWriters(t *testing.T) {
	const steps = 30
	d := newMemDir()
	var wg sync.WaitGroup
	for n := range 6 {
		app := string(rune('a' + n%3))
		wg.Go(func() {
			table, err := open(d)
			for step := int64(1); step <= steps && err == nil; step++ {
				if err = publish(table, app, step); err == nil && step%7 == 0 {
					err = join(table, app)
				}
				if err == nil {
					err = table.Checkpoint(context.Background(), 10, 5)
				}
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	table, err := open(d)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := sum(table.State()), int64(3*steps*(steps+1)/2); got != want {
		t.Errorf("DATA: the table has the sum %d, want %d", got, want)
	}
}

// TestSleeper: a writer that slept while its next commit came and was removed does not commit
// in the past.
func TestSleeper(t *testing.T) {
	d := newMemDir()
	awake, err := open(d)
	if err != nil {
		t.Fatal(err)
	}
	if err := publish(awake, "a", 1); err != nil {
		t.Fatal(err)
	}
	sleeper, err := open(d)
	if err != nil {
		t.Fatal(err)
	}
	const steps = 100
	d.before = func(name string) {
		if name != commitName(1) {
			return
		}
		d.before = nil // the sleeper falls asleep in its commit
		for step := int64(2); step <= steps; step++ {
			if err := errors.Join(publish(awake, "a", step), awake.Checkpoint(context.Background(), 10, 5)); err != nil {
				t.Error(err)
			}
		}
	}
	if err := publish(sleeper, "b", 7); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{commitName(0), commitName(2), commitName(20)} {
		if d.files[name] != nil {
			t.Errorf("%s was not removed", name)
		}
	}
	if sleeper.State().Version != steps {
		t.Errorf("DATA: the commit of the sleeper is version %d, want %d", sleeper.State().Version, steps)
	}
	last, err := open(d)
	if err != nil {
		t.Fatal(err)
	}
	if got := last.State(); got.Done("a") != steps || got.Done("b") != 7 || len(got.Files) != steps+1 {
		t.Errorf("DATA: steps %d and %d, %d files", got.Done("a"), got.Done("b"), len(got.Files))
	}
}

// TestCheckpoint: a checkpoint has the whole state, in every field.
func TestCheckpoint(t *testing.T) {
	s := NewState()
	first := append(Begin("some-id", 12, columns),
		Action{Txn: &Txn{App: "partition-0", Version: 5, Updated: 9}},
		Action{Add: &Add{Path: "data/p=0/a.parquet", PartitionValues: map[string]string{}, Size: 7, Modified: 8, DataChange: true, Stats: "{}", Tags: map[string]string{"level": "1"}}},
		Action{Remove: &Remove{Path: "data/p=0/b.parquet", Deleted: 20}},
		Action{Remove: &Remove{Path: "data/p=0/c.parquet", Deleted: 3}})
	if err := s.Apply(0, first); err != nil {
		t.Fatal(err)
	}
	b, err := EncodeCheckpoint(s.Actions(10))
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeCheckpoint(b)
	if err != nil {
		t.Fatal(err)
	}
	want := s.Actions(10)
	if g, w := string(Encode(got)), string(Encode(want)); g != w {
		t.Errorf("a checkpoint has\n%s, want\n%s", g, w)
	}
	if again, err := Decode(Encode(want)); err != nil || !reflect.DeepEqual(again, want) {
		t.Errorf("a commit becomes %+v, %v", again, err)
	}
	for i := 0; i < len(b); i += 1 + i/64 {
		bad := append([]byte(nil), b...)
		bad[i] ^= byte(1 + rand.IntN(255))
		if _, err := DecodeCheckpoint(bad); err != nil && !errors.Is(err, meta.Corrupt) {
			t.Errorf("byte %d: %v", i, err)
		}
	}
}

// TestRefused: a table that needs more than this program knows is not written.
func TestRefused(t *testing.T) {
	d := newMemDir()
	d.files[commitName(0)] = []byte(`{"protocol":{"minReaderVersion":3,"minWriterVersion":7,"readerFeatures":["deletionVectors"]}}` + "\n")
	if _, err := open(d); !errors.Is(err, meta.Version) {
		t.Errorf("a newer protocol: %v", err)
	}
	d.files[commitName(0)] = []byte(`{"txn":{"appId":"a","version":1}}`)
	if _, err := open(d); !errors.Is(err, meta.Corrupt) {
		t.Errorf("a table without protocol: %v", err)
	}
	for _, text := range []string{`{`, `{"add":{"path":"/etc/passwd"}}`, `{"add":{"path":"a"},"remove":{"path":"b"}}`, `{"add":{"path":"a","size":-1}}`} {
		s := NewState()
		actions, err := Decode([]byte(text))
		if err == nil {
			err = s.Apply(0, append(Begin("id", 1, columns), actions...))
		}
		if !errors.Is(err, meta.Corrupt) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// TestSchema compares the schema with the text of the protocol.
func TestSchema(t *testing.T) {
	got := Begin("id", 1, columns)[1].Metadata.Schema
	want := `{"type":"struct","fields":[{"name":"offset","type":"long","nullable":false,"metadata":{}},{"name":"value","type":"binary","nullable":true,"metadata":{}},
	{"name":"headers","type":{"type":"array","elementType":{"type":"struct","fields":[{"name":"name","type":"string","nullable":false,"metadata":{}}]},"containsNull":true},"nullable":true,"metadata":{}}]}`
	var g, w any
	if err := errors.Join(json.Unmarshal([]byte(got), &g), json.Unmarshal([]byte(want), &w)); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(g, w) {
		t.Errorf("the schema is\n%s, want\n%s", got, want)
	}
}

// FuzzCommit: a commit that is accepted is the same commit when it is written again.
func FuzzCommit(f *testing.F) {
	f.Add(Encode(Begin("id", 1, columns)))
	f.Add([]byte(`{"add":{"path":"data/p%3D0/a","size":1}}` + "\n" + `{"cdc":{}}` + "\n" + `{"txn":{"appId":"a","version":9}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		actions, err := Decode(b)
		if err != nil {
			return
		}
		s := NewState()
		if err := s.Apply(0, append(Begin("id", 1, columns), actions...)); err != nil {
			return
		}
		if err := s.Check(); err != nil {
			t.Error(err)
		}
		again, err := Decode(Encode(actions))
		if err != nil || string(Encode(again)) != string(Encode(actions)) {
			t.Errorf("%s becomes %s, %v", Encode(actions), Encode(again), err)
		}
	})
}

// FuzzCheckpoint: any bytes are a checkpoint or an error.
func FuzzCheckpoint(f *testing.F) {
	b, err := EncodeCheckpoint(append(Begin("id", 1, columns), Action{Add: &Add{Path: "a", Size: 1}}))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := DecodeCheckpoint(b); err != nil && !errors.Is(err, meta.Corrupt) {
			t.Error(err)
		}
	})
}
