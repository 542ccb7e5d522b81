package reply

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
)

func TestCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want codes.Code
	}{
		{nil, codes.OK},
		{meta.E("find volume", meta.NoSuchVolume, "v", nil), codes.NotFound},
		{fmt.Errorf("step: %w", meta.E("create", meta.Invalid, "v", nil)), codes.InvalidArgument},
		{meta.E("write", meta.Fenced, "v", nil), codes.Internal},
		{errors.New("other"), codes.Internal},
		{meta.E("call", meta.Unavailable, "", context.DeadlineExceeded), codes.DeadlineExceeded},
		{context.Canceled, codes.Canceled},
		{status.Error(codes.Aborted, "x"), codes.Aborted},
		{meta.E("find mount", meta.NotFound, "p", status.Error(codes.InvalidArgument, "x")), codes.NotFound},
	} {
		if got := status.Code(Error(c.err)); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}

func TestPending(t *testing.T) {
	var p Pending
	end, err := p.Begin("a", "b")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Begin("c", "b"); status.Code(err) != codes.Aborted {
		t.Errorf("the same thing twice: %v", err)
	}
	if other, err := p.Begin("c"); err != nil {
		t.Errorf("a refused call claimed something: %v", err)
	} else {
		other()
	}
	end()
	if _, err := p.Begin("a", "b"); err != nil {
		t.Errorf("after its end: %v", err)
	}
}
