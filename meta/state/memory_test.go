package state

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"penstock.io/penstock/meta/journal"
)

// TestBusyStoresLeaveTheCache: writes to several stores take no room from the cached blocks of
// other stores.
func TestBusyStoresLeaveTheCache(t *testing.T) {
	t.Parallel()
	const cache, table = 8 << 20, 2 << 20 // as 64 and 16 MiB
	sh := NewShared(cache, 100, nil)
	sh.memTable = table
	defer sh.Close()
	r := rand.New(rand.NewChaCha8([32]byte{3}))
	value := make([]byte, 1000)
	key := func(i int) []byte { return binary.BigEndian.AppendUint64([]byte{'k'}, uint64(i)) }
	var all []*Store
	for i := range 5 {
		s, err := Create(filepath.Join(t.TempDir(), fmt.Sprint(i)), vol, sh)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	const keys = 5000 // of 5 MB: all fit
	fill := func(s *Store, rounds int) {
		t.Helper()
		for range rounds {
			for from := 0; from < keys; from += 100 {
				at := journal.Position{Seq: s.Applied().Seq + 1, Hash: journal.Hash(bytes.Repeat([]byte{1}, 16))}
				if err := s.Apply(at, func(b Batch) error {
					for i := from; i < from+100; i++ {
						for j := range value {
							value[j] = byte(r.Uint32())
						}
						b.Put(key(i), value)
					}
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	fill(all[0], 1)
	if err := all[0].Flush(); err != nil {
		t.Fatal(err)
	}
	for _, s := range all[1:] {
		fill(s, 3)
	}
	read := func() (misses int64) {
		t.Helper()
		before := sh.cache.Metrics().Misses
		for i := range keys {
			if _, ok, err := all[0].Get(key(i)); err != nil || !ok {
				t.Fatal(ok, err)
			}
		}
		return sh.cache.Metrics().Misses - before
	}
	misses := read()
	for range 20 { // flushes and compactions may be under way, and take blocks
		if misses = read(); misses <= keys/20 {
			break
		}
	}
	if misses > keys/20 {
		t.Errorf("%d misses for %d keys that were just read, in a cache of %d bytes with %d of blocks", misses, keys, cache, sh.cache.Metrics().Size)
	}
	for _, s := range all {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	for i := range all {
		if n := all[i].memory.given; n != 0 {
			t.Errorf("a closed store's tables count %d bytes", n)
		}
	}
}
