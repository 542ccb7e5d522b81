package wire

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"reflect"
	"runtime"
	"sync"
	"testing"

	"penstock.io/penstock/meta"
)

// messages makes an empty message of every type.
func messages() []Message {
	return []Message{
		new(Hello), new(Call), new(Reply), new(Batch), new(BatchRe), new(Sync), new(Durable), new(Recall), new(Recalled),
		new(Drop), new(KeepAlive), new(Alloc), new(Grants), new(Seal), new(Lock), new(LockRe), new(Cancel), new(Admin),
		new(AdminRe), new(Report), new(Order), new(OrderRe), new(Claim), new(Bye), new(Caps), new(CapsRe), new(Servers),
		new(Reported), new(Trouble), new(GaveUp), new(Enter), new(Entered), new(Back), new(Moved), new(Metas),
		new(Reserve), new(Reserved), new(Quota),
		new(Policy), new(PolicyTaken), new(Growth), new(GrowthRe),
	}
}

var ops = []meta.Op{
	new(meta.Lookup), new(meta.GetAttr), new(meta.ReadDir), new(meta.ReadLink), new(meta.GetXattr), new(meta.ListXattr), new(meta.Open),
	new(meta.StatFSOp), new(meta.Seek), new(meta.Create), new(meta.Tmpfile), new(meta.Link), new(meta.Unlink), new(meta.Rename),
	new(meta.SetAttr), new(meta.Write), new(meta.Fallocate), new(meta.CopyRange), new(meta.SetXattr), new(meta.RemoveXattr),
	new(meta.ReleaseOrphans), new(meta.ReplaceExtents),
}

var opType = reflect.TypeFor[meta.Op]()

// fill gives every field a value drawn from r.
func fill(v reflect.Value, r *rand.Rand) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(r.IntN(2) == 1)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(int64(r.Uint64()) >> (64 - v.Type().Bits() + r.IntN(v.Type().Bits())))
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(r.Uint64() >> (64 - v.Type().Bits() + r.IntN(v.Type().Bits())))
	case reflect.String:
		b := make([]byte, r.IntN(12))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		v.SetString(string(b))
	case reflect.Slice:
		n := r.IntN(4)
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			fill(v.Index(i), r)
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i), r)
		}
	case reflect.Pointer:
		if r.IntN(2) == 1 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem(), r)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i), r)
			}
		}
	case reflect.Interface:
		if v.Type() != opType {
			panic(fmt.Sprintf("a field of type %v", v.Type()))
		}
		op := reflect.New(reflect.TypeOf(ops[r.IntN(len(ops))]).Elem())
		fill(op.Elem(), r)
		v.Set(op)
	default:
		panic(fmt.Sprintf("a field of kind %v", v.Kind()))
	}
}

func empty(m Message) Message { return reflect.New(reflect.TypeOf(m).Elem()).Interface().(Message) }

// again encodes, reads the frame, decodes, encodes.
func again(t *testing.T, m Message) (first, second []byte, got Message) {
	t.Helper()
	first = Append(nil, Version, 7, m)
	rd := NewReader(bytes.NewReader(first))
	rd.Trust()
	typ, id, body, err := rd.Next()
	if err != nil || id != 7 || typ != m.frameType() {
		t.Fatalf("%T: frame of type %d, id %d: %v", m, typ, id, err)
	}
	got = empty(m)
	if body.Version != Version {
		t.Fatalf("%T: a frame of version %d", m, body.Version)
	}
	if err := Decode(body, got); err != nil {
		t.Fatalf("%T %+v: %v", m, m, err)
	}
	return first, Append(nil, Version, 7, got), got
}

func TestEveryTypeHasAMessage(t *testing.T) {
	seen := map[Type]bool{}
	for _, m := range messages() {
		seen[m.frameType()] = true
	}
	for typ := Type(1); typ < lastType; typ++ {
		if !seen[typ] {
			t.Errorf("no message of frame type %d is tested", typ)
		}
	}
}

func TestEveryMessageComesBack(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		for _, m := range messages() {
			fill(reflect.ValueOf(m).Elem(), r)
			if a, b, got := again(t, m); !bytes.Equal(a, b) {
				t.Fatalf("%T\n sent %+v\n got  %+v", m, m, got)
			}
		}
	}
}

// Encode changes nothing in the message: two goroutines may encode a shared message at the same
// time (make race shows a violation).
func TestEncodingChangesNothing(t *testing.T) {
	for seed := range uint64(100) {
		filled := func() []Message {
			r, all := rand.New(rand.NewPCG(seed, 9)), messages()
			for _, m := range all {
				fill(reflect.ValueOf(m).Elem(), r)
			}
			return all
		}
		all := filled()
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for _, m := range all {
					if _, err := Encode(nil, Version, 7, m); err != nil {
						t.Errorf("%T: %v", m, err)
					}
				}
			})
		}
		wg.Wait()
		for i, m := range filled() {
			if !reflect.DeepEqual(m, all[i]) {
				t.Fatalf("%T\n was %+v\n is  %+v", m, m, all[i])
			}
		}
	}
}

// A body cut off anywhere is refused, and so is a body with a byte too many.
func TestCutBodiesAreRefused(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, m := range messages() {
		fill(reflect.ValueOf(m).Elem(), r)
		body := Append(nil, Version, 1, m)[HeaderSize:]
		for n := range body {
			if err := Decode(Body{Version, body[:n:n]}, empty(m)); err == nil {
				t.Fatalf("%T: %d of %d bytes are taken for all", m, n, len(body))
			}
		}
		if err := Decode(Body{Version, append(body, 0)}, empty(m)); meta.KindOf(err) != meta.Protocol {
			t.Fatalf("%T with a byte too many: %v", m, err)
		}
	}
}

// The decoder does not allocate a claimed length before the bytes have come.
func TestClaimedLengthsAllocateNothing(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	huge := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}
	for _, m := range messages() {
		fill(reflect.ValueOf(m).Elem(), r)
		body := Append(nil, Version, 1, m)[HeaderSize:]
		for at := range len(body) + 1 {
			bad := append(append(append([]byte{}, body[:at]...), huge...), body[at:]...)
			var a, b runtime.MemStats
			runtime.ReadMemStats(&a)
			err := Decode(Body{Version, bad}, empty(m))
			runtime.ReadMemStats(&b)
			if n := b.TotalAlloc - a.TotalAlloc; n > 64<<10+64*uint64(len(bad)) {
				t.Fatalf("%T: %d bytes make it allocate %d (%v)", m, len(bad), n, err)
			}
		}
	}
}

func FuzzDecode(f *testing.F) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 4 {
		for i, m := range messages() {
			fill(reflect.ValueOf(m).Elem(), r)
			f.Add(uint8(i), Append(nil, Version, 1, m)[HeaderSize:])
		}
	}
	f.Fuzz(func(t *testing.T, i uint8, body []byte) {
		all := messages()
		m := all[int(i)%len(all)]
		if err := Decode(Body{Version, body}, m); err != nil {
			if k := meta.KindOf(err); k != meta.Protocol && k != meta.Version {
				t.Fatalf("%T: kind %v: %v", m, k, err)
			}
			return
		}
		if a, b, _ := again(t, m); !bytes.Equal(a, b) {
			t.Fatalf("%T: %x comes back as %x", m, a, b)
		}
	})
}

func FuzzReader(f *testing.F) {
	r := rand.New(rand.NewPCG(9, 10))
	var stream []byte
	for _, m := range messages() {
		fill(reflect.ValueOf(m).Elem(), r)
		frame := Append(nil, Version, r.Uint64(), m)
		f.Add(frame, true)
		stream = append(stream, frame...)
	}
	f.Add(stream, true)
	f.Add(stream, false)
	f.Add([]byte{0xff, 0xff, 0xff, 0x00, 1, 1, 0, 0}, true)
	f.Fuzz(func(t *testing.T, b []byte, trusted bool) {
		rd := NewReader(bytes.NewReader(b))
		if trusted {
			rd.Trust()
		}
		left := len(b)
		for {
			typ, _, body, err := rd.Next()
			if err != nil {
				if k := meta.KindOf(err); k != meta.Protocol && k != meta.Version && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Fatalf("%v", err)
				}
				return
			}
			if left -= HeaderSize + len(body.Bytes); left < 0 || typ == 0 || typ >= lastType {
				t.Fatalf("type %d, %d bytes beyond the input", typ, -left)
			}
			if !trusted && len(body.Bytes) > MaxHello {
				t.Fatalf("a stranger's frame of %d bytes is taken", len(body.Bytes))
			}
		}
	})
}

// A message beyond the frame's limit is an error for its sender, and earlier and later frames are
// sent: no request can stop a server by its answer.
func TestFramesAreBounded(t *testing.T) {
	var sent bytes.Buffer
	s := NewSender(bufferConn{Buffer: &sent}, Version, nil)
	room := MaxFrame - (len(Append(nil, Version, 1, &AdminRe{Report: make([]byte, 1<<21)})) - 1<<21 - 4)
	for i, c := range []struct {
		n    int
		kind meta.Kind
	}{{5, 0}, {room, 0}, {room + 1, meta.ResourceExceeded}, {2 * MaxFrame, meta.ResourceExceeded}, {7, 0}} {
		if err := s.Enqueue(uint64(i), &AdminRe{Report: make([]byte, c.n)}); meta.KindOf(err) != c.kind {
			t.Errorf("%d bytes: %v", c.n, err)
		}
	}
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	rd := NewReader(&sent)
	rd.Trust()
	for _, want := range []int{5, room, 7} {
		_, _, body, err := rd.Next()
		var re AdminRe
		if err == nil {
			err = Decode(body, &re)
		}
		if err != nil || len(re.Report) != want {
			t.Fatalf("%d bytes, want %d: %v", len(re.Report), want, err)
		}
	}
	if _, _, _, err := rd.Next(); err != io.EOF {
		t.Error(err)
	}
	dst := []byte("before")
	if b, err := Encode(dst, Version, 1, &AdminRe{Report: make([]byte, MaxFrame)}); err == nil || string(b) != "before" {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

// bufferConn is a connection of which only the writing is used.
type bufferConn struct {
	net.Conn
	*bytes.Buffer
}

func (c bufferConn) Write(p []byte) (int, error) { return c.Buffer.Write(p) }
func (c bufferConn) Read(p []byte) (int, error)  { return c.Buffer.Read(p) }
