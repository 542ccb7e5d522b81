// Package ingest defines the messages of the gRPC service Ingest, which appends records to
// streams; ingest.proto says what each message means. Package stream/ingest/server serves the
// messages, package stream/ingest/client sends them.
package ingest

//go:generate go run ../../meta/admin/gen . penstock/ingest/v1/
