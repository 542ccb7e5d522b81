package client_test

import (
	"context"
	"fmt"
	"log"

	"penstock.io/penstock/stream/ingest"
	"penstock.io/penstock/stream/ingest/client"
)

// A program that may be killed at any time appends the lines of a file, each once.
func ExampleProducer() {
	ctx, lines := context.Background(), []string{`{"user":1}`, `{"user":2}`}
	p, err := client.New(client.Config{Gateways: []string{"127.0.0.1:9094"}, Stream: "/v/clicks", Name: "sensor-7"})
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close()
	last, err := p.Last(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, line := range lines[min(last+1, int64(len(lines))):] {
		r, err := p.Append(ctx, &ingest.Record{Value: []byte(line)})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(r.Offsets[0], r.Refused[0])
	}
}
