package wire

import (
	"bytes"
	"testing"

	"penstock.io/penstock/meta"
)

// A frame of another protocol version is refused before its body is read.
func TestOtherVersionsAreRefused(t *testing.T) {
	for _, v := range []uint8{0, Version + 1, 255} {
		rd := NewReader(bytes.NewReader(Append(nil, v, 1, &Bye{})))
		if _, _, _, err := rd.Next(); meta.KindOf(err) != meta.Version {
			t.Errorf("a frame of version %d: %v", v, err)
		}
	}
}

func TestNegotiate(t *testing.T) {
	for _, x := range []struct {
		min, max uint32
		ok       bool
	}{
		{Version, Version, true},
		{Version, Version + 1, true},
		{0, 1<<32 - 1, true},
		{Version + 1, Version + 2, false},
		{0, Version - 1, false},
		{Version + 1, Version, false},
		{0, 0, false},
	} {
		if v, ok := Negotiate(&Hello{Min: x.min, Max: x.max}); ok != x.ok || ok && v != Version {
			t.Errorf("%d to %d: version %d, %v", x.min, x.max, v, ok)
		}
	}
}
