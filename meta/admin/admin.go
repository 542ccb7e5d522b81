// Package admin owns the administrative API of a cluster, penstock.admin.v1: the services in
// the .proto files of this directory and the code generated from the files, the rules of
// access, the encoding of errors, and the client. A metadata server serves the API on the port
// of its frames.
//
// docs/api.md shows how programs and people use the API.
package admin

//go:generate go run ./gen
