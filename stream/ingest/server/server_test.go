package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/ingest"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/stream/partition"
)

// memDir is the directory of a partition in memory.
type memDir struct {
	mu    sync.Mutex
	files map[string]*memFile
	gate  chan struct{} // unless nil, syncs wait until the channel is closed
	fail  error         // of syncs
}

type memFile struct {
	d    *memDir
	data []byte
}

func (d *memDir) List(context.Context) (l []partition.Info, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, f := range d.files {
		l = append(l, partition.Info{Name: name, Size: int64(len(f.data)), Created: time.Now()})
	}
	return l, nil
}

func (d *memDir) file(name string) (*memFile, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.files[name]; f != nil {
		return f, nil
	}
	return nil, meta.E("open", meta.NotFound, name, nil)
}

func (d *memDir) Open(_ context.Context, name string, _ bool) (partition.File, error) {
	return d.file(name)
}

func (d *memDir) Create(_ context.Context, name string) (partition.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.files[name] = &memFile{d: d}
	return d.files[name], nil
}

func (d *memDir) ReadFile(_ context.Context, name string) ([]byte, error) {
	f, err := d.file(name)
	if err != nil {
		return nil, err
	}
	return slices.Clone(f.data), nil
}

func (d *memDir) Replace(_ context.Context, name string, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.files[name] = &memFile{d: d, data: slices.Clone(data)}
	return nil
}

func (d *memDir) Remove(_ context.Context, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.files, name)
	return nil
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	n := copy(p, f.data[min(off, int64(len(f.data))):])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	f.data = append(f.data[:off], p...)
	return len(p), nil
}

func (f *memFile) Truncate(size int64) error {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	f.data = f.data[:size]
	return nil
}

func (f *memFile) Sync() error {
	f.d.mu.Lock()
	gate, err := f.d.gate, f.d.fail
	f.d.mu.Unlock()
	if gate != nil {
		<-gate
	}
	return err
}

func (f *memFile) Close() error { return nil }

// rig is a Server with the stream /v/s in memory.
type rig struct {
	t      *testing.T
	server *Server
	url    string
	addr   string
	dirs   []*memDir
	// leaders counts the leaderships of all partitions.
	leaders int
	ended   chan struct{} // closed when Serve has returned
	most    atomic.Int64  // bytes of a batch

	mu   sync.Mutex
	logs []*partition.Log
}

// newRig makes a rig whose stream has a format and two partitions.
func newRig(t *testing.T, format string, limits Limits) *rig {
	t.Helper()
	r := &rig{t: t, dirs: []*memDir{{files: map[string]*memFile{}}, {files: map[string]*memFile{}}}, logs: make([]*partition.Log, 2), ended: make(chan struct{})}
	r.most.Store(partition.DefaultMaxBatch)
	r.server = New(Config{Logger: slog.New(slog.DiscardHandler), Limits: limits})
	r.server.find = func(_ context.Context, path string) (target, error) {
		if path != "/v/s" {
			return target{}, meta.E("open stream", meta.NotFound, path, errors.New("no stream is there"))
		}
		return target{format: format, partitions: len(r.logs), named: len(r.logs), partition: r.partition, batchBytes: func() int { return int(r.most.Load()) }}, nil
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = l.Addr().String()
	r.url = "http://" + r.addr + "/v1/append"
	go func() {
		defer close(r.ended)
		if err := r.server.Serve(l); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(r.close)
	return r
}

func (r *rig) close() {
	r.server.Close()
	<-r.ended
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, l := range r.logs {
		if l != nil {
			r.logs[i] = nil
			if err := l.Close(); err != nil {
				r.t.Error(err)
			}
		}
	}
}

// partition opens the log of a partition, again after a failure, as a Host does.
func (r *rig) partition(ctx context.Context, n int32) (*partition.Log, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n < 0 || int(n) >= len(r.logs) {
		return nil, meta.E("open partition", meta.NotFound, "/v/s", errors.New("no such partition"))
	}
	if l := r.logs[n]; l != nil {
		if l.Err() == nil {
			return l, nil
		}
		_ = l.Close() // it has failed
	}
	r.leaders++
	var err error
	r.logs[n], err = partition.Open(ctx, r.dirs[n], partition.Config{Logger: r.server.cfg.Logger}, leader(r.leaders))
	return r.logs[n], err
}

// leader is the leadership of the only process, in an epoch.
type leader uint64

func (l leader) Epoch() uint64       { return uint64(l) }
func (leader) Done() <-chan struct{} { return nil }
func (leader) Valid() bool           { return true }

// values returns the values in a partition.
func (r *rig) values(n int32) (all []string) {
	r.t.Helper()
	l, err := r.partition(r.t.Context(), n)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, high := l.Bounds(); int64(len(all)) < high; {
		p, err := l.Read(int64(len(all)), 1<<20)
		if err != nil {
			r.t.Fatal(err)
		}
		for len(p) > 0 {
			b, err := log.Parse(p, int(r.most.Load()))
			if err != nil {
				r.t.Fatal(err)
			}
			err = b.Each(p[log.HeaderSize:b.Size], func(rec log.Record) error {
				if rec.Offset != int64(len(all)) {
					r.t.Fatalf("DATA: offset %d follows %d records", rec.Offset, len(all))
				}
				all = append(all, string(rec.Value))
				return nil
			})
			if err != nil {
				r.t.Fatal(err)
			}
			p = p[b.Size:]
		}
	}
	return all
}

// post sends a request with a body, and returns the status and the answer.
func (r *rig) post(path, kind string, body io.Reader, change ...func(*http.Request)) (int, answer, http.Header) {
	r.t.Helper()
	q, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, r.url+path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	q.Header.Set("Content-Type", kind)
	for _, c := range change {
		c(q)
	}
	p, err := http.DefaultClient.Do(q)
	if err != nil {
		r.t.Fatal(err)
	}
	defer p.Body.Close()
	text, err := io.ReadAll(p.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	var a answer
	if p.Header.Get("Content-Type") == "application/json" {
		if err := json.Unmarshal(text, &a); err != nil {
			r.t.Fatalf("%s: %v", text, err)
		}
	} else {
		a.Error = string(text)
	}
	return p.StatusCode, a, p.Header
}

// TestLinesAreAppended: each line is a record at the offset that the answer names; a bad line is
// refused alone.
func TestLinesAreAppended(t *testing.T) {
	r := newRig(t, "bytes", Limits{})
	status, a, _ := r.post("/v/s?partition=1", typeLines, strings.NewReader("{\"n\":1}\r\n\n[2]\nbad\n\"\xff\"\n3 4\n\"five\""))
	if status != http.StatusUnprocessableEntity || fmt.Sprint(a.Appended) != "[{0 0 2} {5 2 1}]" || a.AppendedCount != 3 || a.RefusedCount != 3 || a.Partition != 1 || a.Stream != "/v/s" {
		t.Errorf("DATA: %d, %+v", status, a)
	}
	for i, why := range []string{"2: the value is not JSON: invalid character", "3: the value is not JSON: it is not UTF-8", "4: the value is not JSON: invalid character"} {
		if got := fmt.Sprintf("%d: %s", a.Refused[i].Record, a.Refused[i].Reason); !strings.HasPrefix(got, why) {
			t.Errorf("%s, not %s", got, why)
		}
	}
	status, a, _ = r.post("/v/s?partition=1", typeText+"; charset=utf-8", strings.NewReader("\xff\n\nlast"))
	if status != http.StatusOK || fmt.Sprint(a.Appended) != "[{0 3 3}]" {
		t.Errorf("DATA: %d, %+v", status, a)
	}
	if got, want := r.values(1), []string{`{"n":1}`, "[2]", `"five"`, "\xff", "", "last"}; !slices.Equal(got, want) {
		t.Errorf("DATA: the log has %q, not %q", got, want)
	}
	// Without a partition the server chooses: two requests go to two partitions.
	for range 2 {
		if status, a, _ = r.post("/v/s", typeText, strings.NewReader("x")); status != http.StatusOK {
			t.Errorf("%d, %+v", status, a)
		}
	}
	if n0, n1 := len(r.values(0)), len(r.values(1)); n0 != 1 || n1 != 7 {
		t.Errorf("DATA: the partitions have %d and %d records", n0, n1)
	}
	if status, a, _ = r.post("/v/s", typeText, strings.NewReader("")); status != http.StatusOK || a.AppendedCount != 0 {
		t.Errorf("no record: %d, %+v", status, a)
	}
}

// TestFormats: the values must have the format of the stream.
func TestFormats(t *testing.T) {
	for format, want := range map[string]int{"bytes": 0, "utf8": 1, "json": 2} {
		r := newRig(t, format, Limits{})
		if _, a, _ := r.post("/v/s?partition=0", typeText, strings.NewReader("text\n\xff\n5\n")); a.RefusedCount != int64(want) || len(r.values(0)) != 3-want {
			t.Errorf("DATA: format %s: %+v", format, a)
		}
	}
}

// TestLargeBodies: many batches, a line that is too long, and a body that is too long.
func TestLargeBodies(t *testing.T) {
	r := newRig(t, "bytes", Limits{Body: 8 << 20})
	line := strings.Repeat("x", 999)
	long := strings.Repeat("y", maxRecord)
	body := strings.Repeat(line+"\n", 3000) + long + "\n" + long + "y\n" + strings.Repeat(line+"\n", 10)
	status, a, _ := r.post("/v/s?partition=0", typeText, strings.NewReader(body))
	if status != http.StatusUnprocessableEntity || fmt.Sprint(a.Appended) != "[{0 0 3001} {3002 3001 10}]" || fmt.Sprint(a.Refused) != "[{3001 a record of more than 1048576 bytes}]" {
		t.Errorf("DATA: %d, %+v", status, a)
	}
	if got := r.values(0); len(got) != 3011 || got[3000] != long || got[3010] != line {
		t.Errorf("DATA: %d records", len(got))
	}
	// Of a body without a length, what fits is appended, as the answer says.
	body = strings.Repeat(line+"\n", 9000)
	for _, known := range []bool{true, false} {
		status, a, _ = r.post("/v/s?partition=1", typeText, strings.NewReader(body), func(q *http.Request) {
			if !known {
				q.ContentLength, q.Body = -1, io.NopCloser(strings.NewReader(body))
			}
		})
		if got := len(r.values(1)); status != http.StatusRequestEntityTooLarge || a.Error == "" || a.AppendedCount != int64(got) || known != (got == 0) {
			t.Errorf("DATA: %d, %+v, and %d records", status, a, got)
		}
	}
}

// TestSmallBatches: no batch is larger than the stream allows, whatever comes over HTTP or gRPC, and a
// record that is larger alone is refused alone. A changed bound counts for calls that are under way.
func TestSmallBatches(t *testing.T) {
	r := newRig(t, "bytes", Limits{})
	cc := r.dial()
	named, _ := r.open(cc, &ingest.Open{Stream: "/v/s", Partition: new(int32), Producer: "p"})
	one := int32(1)
	plain, _ := r.open(cc, &ingest.Open{Stream: "/v/s", Partition: &one})
	r.most.Store(300)
	line := strings.Repeat("x", 50)
	long := strings.Repeat("y", 300-log.HeaderSize-recordFrame)
	most := strings.Repeat("y", 300-log.HeaderSize-9) // beside 9 bytes of the record: length 2, attributes 1, time 1, offset 1, key 1, value 2, headers 1
	records := []string{line, long, line, most + "y", line, line, line, line, most, line}
	const runs, refused = "[{0 0 3} {4 3 6}]", "[{3 a batch with the record alone has 301 bytes, max.message.bytes of the stream is 300}]"
	status, a, _ := r.post("/v/s?partition=0", typeText, strings.NewReader(strings.Join(records, "\n")))
	if status != http.StatusUnprocessableEntity || fmt.Sprint(a.Appended) != runs || fmt.Sprint(a.Refused) != refused {
		t.Errorf("DATA: %d, %+v", status, a)
	}
	for what, c := range map[string]appendCall{"with a name": named, "without a name": plain} {
		b := &ingest.Batch{}
		if c == named {
			b.Sequence = new(int64)
		}
		for _, v := range records {
			b.Records = append(b.Records, &ingest.Record{Value: []byte(v)})
		}
		if got, err := exchange(c, b); err != nil || !strings.HasSuffix(got, ", 3 refused") || strings.Count(got, "+") != 2 {
			t.Errorf("DATA: a call %s: %s, %v", what, got, err)
		}
	}
	want := slices.Delete(slices.Clone(records), 3, 4)
	if got := r.values(0); !slices.Equal(got, append(want, want...)) { // values refuses larger batches
		t.Errorf("DATA: partition 0 has %q", got)
	}
	if got := r.values(1); !slices.Equal(got, want) {
		t.Errorf("DATA: partition 1 has %q", got)
	}
}

// TestBadRequests: what can't be served is refused with a reason, and nothing is appended.
func TestBadRequests(t *testing.T) {
	r := newRig(t, "bytes", Limits{})
	host := func(h string) func(*http.Request) { return func(q *http.Request) { q.Host = h } }
	header := func(k, v string) func(*http.Request) { return func(q *http.Request) { q.Header.Set(k, v) } }
	none := func(*http.Request) {}
	for _, c := range []struct {
		path, kind string
		change     func(*http.Request)
		status     int
		why        string
	}{
		{"/v/none", typeText, none, 404, "no stream is there"},
		{"/", typeText, none, 404, "no stream is there"},
		{"/v/s?partition=2", typeText, none, 404, "no such partition"},
		{"/v/s?partition=-1", typeText, none, 404, "no such partition"},
		{"/v/s?partition=x", typeText, none, 400, "is no number"},
		{"/v/s", "application/x-www-form-urlencoded", none, 415, "application/x-ndjson"},
		{"/v/s", typeText, header("Content-Encoding", "gzip"), 415, "without Content-Encoding"},
		{"/v/s", typeText, header("Origin", "http://example.com"), 403, "cross-origin"},
		{"/v/s", typeText, host("example.com"), 403, "loopback"},
		{"/v/s", typeText, func(q *http.Request) { q.Method = http.MethodGet }, 405, "Method Not Allowed"},
	} {
		status, a, _ := r.post(c.path, c.kind, strings.NewReader("line\n"), c.change)
		if status != c.status || !strings.Contains(a.Error, c.why) {
			t.Errorf("%s %s: %d %q, not %d %q", c.path, c.kind, status, a.Error, c.status, c.why)
		}
	}
	for _, h := range []string{"localhost", "127.0.0.1", "[::1]:80", r.addr} {
		if status, a, _ := r.post("/v/s?partition=0", typeText, strings.NewReader(""), host(h)); status != http.StatusOK {
			t.Errorf("host %s: %d, %+v", h, status, a)
		}
	}
	if n := len(r.values(0)) + len(r.values(1)); n != 0 {
		t.Errorf("DATA: %d records", n)
	}
}

// TestAcknowledgedAfterSync: no answer comes before the sync, an error of the sync is the
// answer, and the next request finds the partition open again.
func TestAcknowledgedAfterSync(t *testing.T) {
	r := newRig(t, "bytes", Limits{})
	gate := make(chan struct{})
	r.dirs[0].gate = gate
	done := make(chan answer, 1)
	go func() {
		_, a, _ := r.post("/v/s?partition=0", typeText, strings.NewReader("one\n"))
		done <- a
	}()
	select {
	case a := <-done:
		t.Errorf("DATA: the answer %+v came before the sync", a)
	case <-time.After(200 * time.Millisecond):
	}
	close(gate)
	if a := <-done; a.AppendedCount != 1 {
		t.Errorf("DATA: %+v", a)
	}
	r.dirs[0].mu.Lock()
	r.dirs[0].gate, r.dirs[0].fail = nil, meta.E("sync", meta.NoSpace, "disk", nil)
	r.dirs[0].mu.Unlock()
	status, a, h := r.post("/v/s?partition=0", typeText, strings.NewReader("two\n"))
	if status != http.StatusInsufficientStorage || a.Error == "" || a.AppendedCount != 0 || h.Get("Retry-After") == "" {
		t.Errorf("DATA: %d, %+v", status, a)
	}
	r.dirs[0].mu.Lock()
	r.dirs[0].fail = nil
	r.dirs[0].mu.Unlock()
	if status, a, _ = r.post("/v/s?partition=0", typeText, strings.NewReader("three\n")); status != http.StatusOK {
		t.Errorf("%d, %+v", status, a)
	}
	if got := r.values(0); got[0] != "one" || got[len(got)-1] != "three" {
		t.Errorf("DATA: %q", got)
	}
}

// TestManyRequestsOnASlowDisk: the records of 1,000 producers take no more memory than allowed;
// requests beyond that wait, and are told to come again.
func TestManyRequestsOnASlowDisk(t *testing.T) {
	limits := Limits{Memory: 16 << 20, Patience: 100 * time.Millisecond, Connections: 1100}
	r := newRig(t, "bytes", limits)
	gate := make(chan struct{})
	for _, d := range r.dirs {
		d.gate = gate
	}
	const producers, size = 1000, 100 << 10
	body := strings.Repeat("x", size)
	var wg sync.WaitGroup
	var mu sync.Mutex
	count := map[int]int{}
	for range producers {
		wg.Go(func() {
			status, a, h := r.post("/v/s", typeText, strings.NewReader(body))
			if status == http.StatusTooManyRequests && (h.Get("Retry-After") == "" || a.AppendedCount != 0) {
				t.Errorf("%v, %+v", h, a)
			}
			mu.Lock()
			defer mu.Unlock()
			count[status]++
			if status == http.StatusTooManyRequests && count[status] == producers-int(limits.Memory)/(3*size+recordCosts) {
				close(gate) // all others hold memory
			}
		})
	}
	wg.Wait()
	if n := len(r.values(0)) + len(r.values(1)); n != count[http.StatusOK] || n != int(limits.Memory)/(3*size+recordCosts) || count[http.StatusOK]+count[http.StatusTooManyRequests] != producers {
		t.Errorf("DATA: answers %v, and %d records", count, n)
	}
}

// FuzzLines compares lines with a split of all bytes.
func FuzzLines(f *testing.F) {
	f.Add([]byte("a\r\n\nb"), 1)
	f.Add([]byte(strings.Repeat("x", 40000)+"\n"+strings.Repeat("y", 20000)), 30000)
	f.Fuzz(func(t *testing.T, p []byte, most int) {
		most = max(0, min(most, 1<<20))
		var want []string
		for line := range strings.SplitSeq(string(p), "\n") {
			want = append(want, line)
		}
		if want[len(want)-1] == "" {
			want = want[:len(want)-1]
		}
		l := newLines(strings.NewReader(string(p)))
		for i := 0; ; i++ {
			line, long, err := l.next(most)
			if errors.Is(err, io.EOF) && i == len(want) {
				return
			}
			if err != nil || i >= len(want) {
				t.Fatalf("line %d of %d: %v", i, len(want), err)
			}
			full := want[i]
			if i < len(want)-1 || strings.HasSuffix(string(p), "\n") {
				full = strings.TrimSuffix(full, "\r")
			}
			if long != (len(full) > most) || !long && string(line) != full {
				t.Fatalf("line %d is %q, long %v, not %q with a bound of %d", i, line, long, full, most)
			}
		}
	})
}
