package capability

import (
	"bytes"
	"testing"

	"penstock.io/penstock/meta"
)

var (
	key   = meta.CapKey{ID: 7, Secret: bytes.Repeat([]byte{1}, 32)}
	other = meta.CapKey{ID: 8, Secret: bytes.Repeat([]byte{2}, 32)}
	claim = Claims{Volume: 3, Chunk: meta.ChunkID{Volume: 3, Term: 2, Counter: 9}, Rights: Append | Read,
		Fence: meta.Fence{Term: 2, Seals: 1}, MaxLen: 1000, Client: "host:1", Class: "fast-flash", Expiry: 100}
)

func TestRoundTrip(t *testing.T) {
	tok := Sign(key, claim)
	got, err := Verify([]meta.CapKey{other, key}, tok, 99)
	if err != nil || got != claim {
		t.Fatalf("%+v, %v", got, err)
	}
}

// Every flipped bit, another key, a later time: refused.
func TestRefused(t *testing.T) {
	tok := Sign(key, claim)
	for i := range len(tok) * 8 {
		bad := bytes.Clone(tok)
		bad[i/8] ^= 1 << (i % 8)
		if _, err := Verify([]meta.CapKey{key, other}, bad, 1); meta.KindOf(err) != meta.BadCapability {
			t.Fatalf("bit %d flipped: %v", i, err)
		}
	}
	for name, err := range map[string]error{
		"expired":      verr(Verify([]meta.CapKey{key}, tok, 100)),
		"no key":       verr(Verify([]meta.CapKey{other}, tok, 1)),
		"none":         verr(Verify([]meta.CapKey{key}, nil, 1)),
		"empty secret": verr(Verify([]meta.CapKey{{ID: 7}}, Sign(meta.CapKey{ID: 7}, claim), 1)),
	} {
		if meta.KindOf(err) != meta.BadCapability {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func verr(_ Claims, err error) error { return err }

func TestAllow(t *testing.T) {
	f := claim.Fence
	wide := Claims{Volume: 3, Rights: Read, Expiry: 100}
	for _, c := range []struct {
		name  string
		claim Claims
		right Rights
		chunk meta.ChunkID
		fence meta.Fence
		end   uint64
		want  meta.Kind
	}{
		{"append", claim, Append, claim.Chunk, f, 1000, meta.KindOK},
		{"too long", claim, Append, claim.Chunk, f, 1001, meta.BadCapability},
		{"old fence", claim, Append, claim.Chunk, meta.Fence{Term: 1}, 1, meta.Fenced},
		{"read", claim, Read, claim.Chunk, meta.Fence{}, 0, meta.KindOK},
		{"no right", claim, Delete, claim.Chunk, f, 0, meta.BadCapability},
		{"other chunk", claim, Read, meta.ChunkID{Volume: 3, Term: 2, Counter: 10}, f, 0, meta.BadCapability},
		{"whole volume", wide, Read, claim.Chunk, f, 0, meta.KindOK},
		{"other volume", wide, Read, meta.ChunkID{Volume: 4, Term: 2, Counter: 9}, f, 0, meta.BadCapability},
	} {
		if got := meta.KindOf(c.claim.Allow(c.right, c.chunk, c.fence, c.end)); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func FuzzVerify(f *testing.F) {
	f.Add(Sign(key, claim))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := Verify([]meta.CapKey{key}, b, 1); err == nil && !bytes.Equal(b, Sign(key, claim)) {
			// Only the seed is signed; anything else that passes is forged.
			t.Fatalf("accepted %x", b)
		}
	})
}
