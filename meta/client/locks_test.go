package client

import (
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

// TestBeyond: a granted, unwanted lock is given back, except for ranges that were held
// before.
func TestBeyond(t *testing.T) {
	lock := func(k meta.LockType, from, to uint64) meta.Lock {
		return meta.Lock{Ino: 2, Owner: 7, Type: k, Start: from, End: to}
	}
	flock := func(k meta.LockType) meta.Lock {
		return meta.Lock{Ino: 2, Owner: 7, Type: k, End: 1<<63 - 1, Flock: true}
	}
	const r, w, u = meta.LockRead, meta.LockWrite, meta.LockUnlock
	for _, c := range []struct {
		name string
		l    meta.Lock
		held []meta.Lock
		back []meta.Lock
	}{
		{"nothing held", lock(w, 10, 19), nil, []meta.Lock{lock(u, 10, 19)}},
		{"all held", lock(w, 10, 19), []meta.Lock{lock(w, 0, 1<<63-1)}, nil},
		{"held elsewhere", lock(w, 10, 19), []meta.Lock{lock(w, 20, 29), lock(w, 0, 9)}, []meta.Lock{lock(u, 10, 19)}},
		{"held around", lock(w, 10, 19), []meta.Lock{lock(w, 18, 30), lock(w, 5, 11)}, []meta.Lock{lock(u, 12, 17)}},
		{"held within", lock(w, 10, 19), []meta.Lock{lock(w, 12, 13)}, []meta.Lock{lock(u, 10, 11), lock(u, 14, 19)}},
		{"weaker held", lock(w, 10, 19), []meta.Lock{lock(r, 0, 14)}, []meta.Lock{lock(r, 10, 14), lock(u, 15, 19)}},
		{"stronger held", lock(r, 10, 19), []meta.Lock{lock(w, 0, 14)}, []meta.Lock{lock(u, 15, 19)}},
		{"to the end", lock(w, 10, 1<<63-1), []meta.Lock{lock(w, 20, 1<<63-1)}, []meta.Lock{lock(u, 10, 19)}},
		{"flock", flock(w), nil, []meta.Lock{flock(u)}},
		{"flock held", flock(w), []meta.Lock{flock(w)}, nil},
		{"flock turned", flock(w), []meta.Lock{flock(r)}, []meta.Lock{flock(r)}},
	} {
		if back := beyond(c.l, c.held); !slices.Equal(back, c.back) {
			t.Errorf("%s: %+v is given back, not %+v", c.name, back, c.back)
		}
	}
}
