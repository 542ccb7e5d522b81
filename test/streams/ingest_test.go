package streams

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// appended is what the answer to an append over HTTP has.
type appended struct {
	Appended []struct{ Record, Offset, Count int64 }
	Refused  []struct {
		Record int64
		Reason string
	}
	Error string
}

// post appends lines over HTTP.
func (m *machine) post(stream, kind, lines string) (int, appended) {
	m.T.Helper()
	q, err := http.NewRequestWithContext(m.T.Context(), http.MethodPost, "http://"+m.ingest+"/v1/append"+stream, strings.NewReader(lines))
	if err != nil {
		m.T.Fatal(err)
	}
	q.Header.Set("Content-Type", kind)
	p, err := http.DefaultClient.Do(q)
	if err != nil {
		m.T.Fatal(err)
	}
	defer p.Body.Close()
	var a appended
	if err := json.NewDecoder(p.Body).Decode(&a); err != nil {
		m.T.Fatal(err)
	}
	return p.StatusCode, a
}

// TestIngest appends over HTTP what Kafka clients read.
func TestIngest(t *testing.T) {
	m := newMachine(t)
	m.Must("stream", "create", "/v/logs of a", "--partitions", "2", "--format", "json")
	if code, a := m.post("/v/logs%20of%20a?partition=1", "application/x-ndjson", "{\"n\":1}\nbad\n{\"n\":2}\n"); code != 422 || fmt.Sprint(a.Appended) != "[{0 0 1} {2 1 1}]" || len(a.Refused) != 1 || a.Refused[0].Record != 1 {
		t.Errorf("DATA: %d, %+v", code, a)
	}
	if code, a := m.post("/v/none", "text/plain", "x\n"); code != 404 || !strings.Contains(a.Error, "no stream is there") {
		t.Errorf("an unknown stream: %d, %+v", code, a)
	}
	for i, r := range m.consume("v.logs..20of..20a", 1, 2) {
		if want := fmt.Sprintf(`{"n":%d}`, i+1); string(r.Value) != want || r.Offset != int64(i) {
			t.Errorf("DATA: offset %d has %q, not %q", r.Offset, r.Value, want)
		}
	}
}
