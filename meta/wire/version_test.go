package wire

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

// frames reads testdata/frames-vN: what a program of version N made.
func frames(t *testing.T, v uint8) (all [][]byte) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("testdata/frames-v%d", v))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		_, frame, _ := strings.Cut(strings.TrimSpace(line), " ")
		f, err := hex.DecodeString(frame)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, f)
	}
	return all
}

// What programs of the oldest version that we speak made is read, and what we
// say in that version is what they said: byte by byte.
func TestFramesOfOldPrograms(t *testing.T) {
	kinds := map[Type]Message{}
	for _, m := range messages() {
		kinds[m.frameType()] = m
	}
	seen := map[Type]bool{}
	for i, frame := range frames(t, MinVersion) {
		rd := NewReader(bytes.NewReader(frame))
		rd.Trust()
		typ, id, body, err := rd.Next()
		if err != nil || body.Version != MinVersion {
			t.Fatalf("frame %d: version %d, %v", i, body.Version, err)
		}
		seen[typ] = true
		m := empty(kinds[typ])
		if err := Decode(body, m); err != nil {
			t.Fatalf("frame %d, type %d: %v", i, typ, err)
		}
		if got, err := Encode(nil, MinVersion, id, m); err != nil || !bytes.Equal(got, frame) {
			t.Fatalf("frame %d, type %d: an old program would not understand %x (%v), it says %x", i, typ, got, err, frame)
		}
	}
	for typ := range kinds {
		if !seen[typ] && typeSince[typ] == 0 {
			t.Errorf("no frame of type %d from version %d", typ, MinVersion)
		}
	}
}

// Every message travels in every version; in the present one nothing of it gets
// lost, in an older one what is lost is lost once only.
func TestEveryMessageInEveryVersion(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	for v := uint8(MinVersion); v <= Version; v++ {
		said := map[Type]int{}
		for range 200 {
			for _, m := range messages() {
				fill(reflect.ValueOf(m).Elem(), r)
				if _, err := Encode(nil, v, 7, m); err != nil {
					if v == Version || meta.KindOf(err) != meta.NotSupported {
						t.Fatalf("%T in version %d: %v", m, v, err)
					}
					continue
				}
				said[m.frameType()]++
				if a, b, got := again(t, v, m); !bytes.Equal(a, b) {
					t.Fatalf("%T in version %d\n sent %+v\n got  %+v", m, v, m, got)
				}
			}
		}
		for typ := Type(1); typ < lastType; typ++ {
			if said[typ] == 0 && typeSince[typ] <= v {
				t.Errorf("nothing of type %d could be said in version %d", typ, v)
			}
		}
	}
}

// What an older peer has no words for is refused by who wants to say it, nothing
// of it is sent, and what comes next is.
func TestWhatCanNotBeSaid(t *testing.T) {
	typeSince[TBye], opSince[meta.OpSeek] = Version, Version
	defer func() { delete(typeSince, TBye); delete(opSince, meta.OpSeek) }()
	for _, m := range []Message{&Bye{}, &Call{Op: &meta.Seek{}}, &Batch{Calls: []Call{{Op: &meta.GetAttr{}}, {Op: &meta.Seek{}}}}} {
		before := []byte("before")
		if got, err := Encode(before, Version-1, 1, m); meta.KindOf(err) != meta.NotSupported || !bytes.Equal(got, before) {
			t.Errorf("%T: %v, %q", m, err, got)
		}
		if _, err := Encode(nil, Version, 1, m); err != nil {
			t.Errorf("%T: %v", m, err)
		}
	}
	s := NewSender(nil, Version-1, nil)
	if err := s.Enqueue(1, &Bye{}); meta.KindOf(err) != meta.NotSupported {
		t.Errorf("it was queued: %v", err)
	}
	if err := s.Enqueue(2, &Cancel{Request: 3}); err != nil || !bytes.Equal(s.buf, Append(nil, Version-1, 2, &Cancel{Request: 3})) {
		t.Errorf("%v, %x waits", err, s.buf)
	}
	c := coder{v: Version - 1}
	if c.need(Version, true, "a word"); meta.KindOf(c.err) != meta.NotSupported {
		t.Errorf("a word that must not be missed: %v", c.err)
	}
	c = coder{v: Version - 1}
	if c.need(Version, false, "a word") || c.err != nil {
		t.Errorf("a word that is not used: %v", c.err)
	}
}

func TestNegotiate(t *testing.T) {
	for _, x := range []struct {
		min, max uint32
		want     uint8
		ok       bool
	}{
		{Version, Version, Version, true},
		{MinVersion, Version, Version, true},
		{MinVersion, MinVersion, MinVersion, true},
		{1, MinVersion, MinVersion, true},
		{Version, Version + 1, Version, true},
		{Version + 1, Version + 2, 0, false},
		{1, MinVersion - 1, 0, false},
		{Version, MinVersion, 0, false},
		{0, 0, 0, false},
		{MinVersion, 1<<32 - 1, Version, true},
	} {
		if v, ok := Negotiate(&Hello{Min: x.min, Max: x.max}); v != x.want || ok != x.ok {
			t.Errorf("%d to %d: %d, %v", x.min, x.max, v, ok)
		}
	}
}
