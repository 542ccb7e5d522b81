package penstock_test

import (
	"context"
	"errors"
	"log"
	"log/slog"
	"os"
	"sync"
	"testing"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// The cluster of the examples: the first example starts a metadata server and a chunk server in
// this process.

var examples struct {
	once   sync.Once
	dir    string
	system *local.System
	client *penstock.Client
}

func TestMain(m *testing.M) {
	code := m.Run()
	if err := endExamples(); err != nil {
		log.Print("the cluster of the examples: ", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// metaServer returns the address of a metadata server.
func metaServer() string {
	examples.once.Do(func() {
		var err error
		if examples.dir, err = os.MkdirTemp("", "penstock-examples-"); err != nil {
			log.Fatal(err)
		}
		if examples.system, err = local.Up(context.Background(), local.Config{Dir: examples.dir, Logger: slog.New(slog.DiscardHandler)}); err != nil {
			log.Fatal(err)
		}
	})
	return examples.system.Meta.Addr
}

// client returns a connection that all examples share. The examples run in sequence.
func client() *penstock.Client {
	if examples.client == nil {
		c, err := penstock.Dial(context.Background(), penstock.Config{Meta: []string{metaServer()}, Name: "examples", Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			log.Fatal(err)
		}
		examples.client = c
	}
	return examples.client
}

// volume makes and opens a volume.
func volume(ctx context.Context, name string) *penstock.Volume {
	volumes, err := client().Volumes()
	if err != nil {
		log.Fatal(err)
	}
	if _, err := volumes.Create(ctx, name, meta.Policy{Replicas: 1}, penstock.VolumeWords{}); err != nil {
		log.Fatal(err)
	}
	v, err := client().Volume(ctx, name)
	if err != nil {
		log.Fatal(err)
	}
	return v
}

// takeSnapshot takes a snapshot by the administrative API.
func takeSnapshot(ctx context.Context, v *penstock.Volume, name string) {
	a, err := admin.New(admin.Config{Addrs: []string{metaServer()}})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	if _, err := a.Snapshots.CreateSnapshot(ctx, &admin.CreateSnapshotRequest{Volume: admin.Numbered(v.ID()), Name: name}); err != nil {
		log.Fatal(err)
	}
}

// endExamples stops the cluster and removes its files.
func endExamples() error {
	ctx := context.Background()
	var errs []error
	if examples.client != nil {
		errs = append(errs, examples.client.Close(ctx))
	}
	if examples.system != nil {
		errs = append(errs, examples.system.Close(ctx))
	}
	if examples.dir != "" {
		errs = append(errs, os.RemoveAll(examples.dir))
	}
	return errors.Join(errs...)
}
