package penstock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// A program connects to a metadata server, makes a volume, and writes and reads a file by path.
// Over TCP, Config.Creds has the program's certificate.
func Example() {
	ctx := context.Background()
	c, err := penstock.Dial(ctx, penstock.Config{Meta: []string{metaServer()}, Name: "example"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close(ctx)

	volumes, err := c.Volumes()
	if err != nil {
		log.Fatal(err)
	}
	if _, err := volumes.Create(ctx, "letters", meta.Policy{Replicas: 1}, penstock.VolumeWords{}); err != nil {
		log.Fatal(err)
	}
	v, err := c.Volume(ctx, "letters")
	if err != nil {
		log.Fatal(err)
	}
	// WriteFile syncs: the file is durable, and every other client sees the file.
	if err := v.Tree().WriteFile(ctx, "/first", []byte("Dear reader,"), 0o644); err != nil {
		log.Fatal(err)
	}
	text, err := v.Tree().ReadFile(ctx, "/first")
	fmt.Printf("%s %v\n", text, err)
	_, err = v.Tree().ReadFile(ctx, "/second")
	fmt.Println(errors.Is(err, meta.NotFound))
	// Output:
	// Dear reader, <nil>
	// true
}

// A File is written in pieces. Sync makes the bytes and the name durable.
func ExampleTree_OpenFile() {
	ctx := context.Background()
	v := volume(ctx, "log")
	f, err := v.Tree().OpenFile(ctx, "/today", os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		log.Fatal(err)
	}
	for i := range 3 {
		if _, err := fmt.Fprintf(f, "line %d\n", i); err != nil {
			log.Fatal(err)
		}
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		log.Fatal(err)
	}
	text, err := v.Tree().ReadFile(ctx, "/today")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(string(text))
	// Output:
	// line 0
	// line 1
	// line 2
}

// A program walks a tree: ReadDirAll lists a directory with the attributes of each file.
func ExampleTree_ReadDirAll() {
	ctx := context.Background()
	t := volume(ctx, "walk").Tree()
	for _, dir := range []string{"/photos/2025", "/photos/2026"} {
		if err := t.MkdirAll(ctx, dir, 0o755); err != nil {
			log.Fatal(err)
		}
		if err := t.WriteFile(ctx, dir+"/index", []byte(dir), 0o644); err != nil {
			log.Fatal(err)
		}
	}
	var walk func(dir string) error
	walk = func(dir string) error {
		list, err := t.ReadDirAll(ctx, dir)
		if err != nil {
			return err
		}
		for _, d := range list {
			path := dir + "/" + d.Name
			if d.Type != meta.TypeDir {
				fmt.Println(path, d.Entry.Attr.Size, "bytes")
			} else if err := walk(path); err != nil {
				return err
			}
		}
		return nil
	}
	if err := walk(""); err != nil {
		log.Fatal(err)
	}
	// Output:
	// /photos/2025/index 12 bytes
	// /photos/2026/index 12 bytes
}

// The administrative API takes a snapshot. A snapshot is opened as a volume that refuses
// changes.
func ExampleVolume_Snapshot() {
	ctx := context.Background()
	v := volume(ctx, "notes")
	if err := v.Tree().WriteFile(ctx, "/note", []byte("before"), 0o644); err != nil {
		log.Fatal(err)
	}
	takeSnapshot(ctx, v, "monday")
	if err := v.Tree().WriteFile(ctx, "/note", []byte("after"), 0o644); err != nil {
		log.Fatal(err)
	}

	s, err := v.Snapshot(ctx, "monday")
	if err != nil {
		log.Fatal(err)
	}
	then, err := s.Tree().ReadFile(ctx, "/note")
	fmt.Println(string(then), err)
	now, err := v.Tree().ReadFile(ctx, "/note")
	fmt.Println(string(now), err)
	err = s.Tree().WriteFile(ctx, "/note", nil, 0o644)
	fmt.Println(errors.Is(err, meta.ReadOnly))
	// Output:
	// before <nil>
	// after <nil>
	// true
}

// A clone begins with the files of a snapshot, copies no bytes, and changes on its own.
func ExampleVolume_Clone() {
	ctx := context.Background()
	v := volume(ctx, "model")
	if err := v.Tree().WriteFile(ctx, "/weights", []byte("1 2 3"), 0o644); err != nil {
		log.Fatal(err)
	}
	takeSnapshot(ctx, v, "v1")
	if err := v.Clone(ctx, "v1", "experiment"); err != nil {
		log.Fatal(err)
	}
	e, err := client().Volume(ctx, "experiment")
	if err != nil {
		log.Fatal(err)
	}
	if err := e.Tree().WriteFile(ctx, "/weights", []byte("4 5 6"), 0o644); err != nil {
		log.Fatal(err)
	}
	for _, v := range []*penstock.Volume{v, e} {
		text, err := v.Tree().ReadFile(ctx, "/weights")
		fmt.Println(v.Name(), string(text), err)
	}
	// Output:
	// model 1 2 3 <nil>
	// experiment 4 5 6 <nil>
}

// A program follows the changes of a volume. Follow resumes after the event that the program
// handled last, also in a later process that stored Since.
func Example_events() {
	ctx := context.Background()
	v := volume(ctx, "inbox")
	a, err := admin.New(admin.Config{Addrs: []string{metaServer()}})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	id := admin.Numbered(v.ID())
	if _, err := a.Events.KeepEvents(ctx, &admin.KeepEventsRequest{Volume: id, Keep: meta.MinEvents}); err != nil {
		log.Fatal(err)
	}
	if err := v.Tree().WriteFile(ctx, "/mail", []byte("hello"), 0o644); err != nil {
		log.Fatal(err)
	}
	if err := v.Tree().Remove(ctx, "/mail"); err != nil {
		log.Fatal(err)
	}

	enough := errors.New("the file was removed")
	err = a.Follow(ctx, &admin.ReadEventsRequest{Volume: id}, true, func(e admin.VolumeEvent) error {
		switch e.Kind {
		case meta.EventCreated:
			fmt.Println("created", e.Path)
		case meta.EventRemoved:
			fmt.Println("removed", e.Path)
			return enough
		}
		return nil
	})
	fmt.Println(errors.Is(err, enough))
	// Output:
	// created mail
	// removed mail
	// true
}
