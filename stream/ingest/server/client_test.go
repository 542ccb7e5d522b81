package server

import (
	"errors"
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/ingest"
	"penstock.io/penstock/stream/ingest/client"
)

// TestProducer: the Go client appends each record once, over failed syncs.
func TestProducer(t *testing.T) {
	r := newRig(t, "json", Limits{})
	p, err := client.New(client.Config{Gateways: []string{r.addr}, Stream: "/v/s", Name: "go"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for n := range int64(30) {
		a, err := p.Append(t.Context(), &ingest.Record{Value: fmt.Append(nil, n)}, &ingest.Record{Value: []byte("no JSON")})
		if err != nil {
			t.Fatal(err)
		}
		if a.Offsets[0] != n || a.Offsets[1] != -1 || a.Refused[1] == "" {
			t.Fatalf("DATA: record %d: %+v", n, a)
		}
	}
	if last, err := p.Last(t.Context()); err != nil || last != 58 {
		t.Errorf("DATA: the last number is %d, %v", last, err)
	}
	q, err := client.New(client.Config{Gateways: []string{r.addr}, Stream: "/v/s", Name: "go"})
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	if last, err := q.Last(t.Context()); err != nil || last != 58 {
		t.Errorf("DATA: the next program finds number %d, %v", last, err)
	}
	if a, err := q.Append(t.Context(), &ingest.Record{Value: []byte("1")}); err != nil || a.Offsets[0] != 30 {
		t.Errorf("DATA: the next program: %+v, %v", a, err)
	}
	none, err := client.New(client.Config{Gateways: []string{r.addr}, Stream: "/v/none", Name: "go"})
	if err != nil {
		t.Fatal(err)
	}
	defer none.Close()
	if _, err := none.Append(t.Context(), &ingest.Record{}); !errors.Is(err, meta.NotFound) {
		t.Errorf("no such stream: %v", err)
	}
}
