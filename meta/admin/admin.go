// Package admin owns the administrative API of a cluster, penstock.admin.v1: the services in
// the .proto files beside this one and what is generated of them, who may call what, how
// errors travel, and the client. A metadata server serves it on the port of its frames.
//
// docs/api.md shows how programs and people use it.
package admin

//go:generate go run ./gen
