// Package ingest defines the messages of the gRPC service Ingest, which appends records to
// streams; ingest.proto says what each message means. Package stream/ingest/server serves the
// messages, package stream/ingest/client sends them.
package ingest

// ErrorDomain is the domain of a google.rpc.ErrorInfo, in the details of a gateway's error. The reason
// is the text of the error's kind (meta.Kind).
const ErrorDomain = "penstock.io"

//go:generate go run ../../meta/admin/gen . penstock/ingest/v1/

// LeaderTrailer is the name of a trailer of a failed Append call: the address, host:port, of the
// gateway that leads the partition.
const LeaderTrailer = "penstock-leader"
