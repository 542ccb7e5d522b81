package cluster

import (
	"context"
	"crypto/tls"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
)

// Dial makes a client of an etcd cluster: endpoints are "https://host:port",
// "http://host:port" or "unix:///path"; tlsConfig is nil without TLS. It does
// not wait for a connection. The client's own log is silent: its errors reach
// the callers. Errors: Invalid.
func Dial(endpoints []string, tlsConfig *tls.Config) (*clientv3.Client, error) {
	cli, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints,
		TLS:       tlsConfig,
		// A silently dead connection is noticed in eight seconds; by default etcd disconnects
		// clients that ping more often than every five seconds.
		DialKeepAliveTime:    6 * time.Second,
		DialKeepAliveTimeout: 2 * time.Second,
		Logger:               zap.NewNop(),
		DialOptions:          []grpc.DialOption{grpc.WithChainUnaryInterceptor(again)},
	})
	if err != nil {
		return nil, meta.E("reach etcd", meta.Invalid, "", err)
	}
	return cli, nil
}

// The first and the longest time for which a read waits for a member before it asks another.
const (
	readPatience    = 300 * time.Millisecond
	maxReadPatience = 8 * time.Second
)

// writePatience bounds a write. The outcome of a write without an answer is unknown; the
// caller determines the outcome.
const writePatience = 3 * time.Second

// A read over a connection that breaks, or that no member answers, is sent again brokenTries
// times, after a pause of brokenPause each.
const (
	brokenTries = 4
	brokenPause = 50 * time.Millisecond
)

// again repeats a read without an answer, and so asks another member: a member that stands
// still keeps its connections. again also repeats a read whose connection broke; etcd's client
// does so for single reads, but not for transactions. again does not repeat writes: only the
// caller knows the effect of a second write.
func again(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	switch {
	case writes(req):
		ctx, cancel := context.WithTimeout(ctx, writePatience)
		defer cancel()
		return invoke(ctx, method, req, reply, cc, opts...)
	case !reads(req):
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	broken := 0
	for n := 0; ; n++ {
		// Members, usually three, are asked in turn: each for a short time before any is asked
		// for longer.
		try, cancel := context.WithTimeout(ctx, min(readPatience<<min(n/3, 8), maxReadPatience))
		err := invoke(try, method, req, reply, cc, opts...)
		cancel()
		switch code := status.Code(err); {
		case err == nil || ctx.Err() != nil:
			return err
		case code == codes.Unavailable && broken < brokenTries:
			broken++
			select {
			case <-time.After(brokenPause):
			case <-ctx.Done():
				return err
			}
		case code != codes.DeadlineExceeded:
			return err
		}
	}
}

// writes reports whether a request changes keys or leases.
func writes(req any) bool {
	switch req.(type) {
	case *etcdserverpb.PutRequest, *etcdserverpb.DeleteRangeRequest, *etcdserverpb.LeaseRevokeRequest:
		return true
	case *etcdserverpb.TxnRequest:
		return !reads(req)
	}
	return false
}

// reads reports whether a request may be made twice.
func reads(req any) bool {
	switch r := req.(type) {
	case *etcdserverpb.RangeRequest, *etcdserverpb.MemberListRequest:
		return true
	case *etcdserverpb.LeaseGrantRequest: // an unknown lease ends by itself
		return true
	case *etcdserverpb.TxnRequest:
		for _, ops := range [][]*etcdserverpb.RequestOp{r.Success, r.Failure} {
			for _, op := range ops {
				if op.GetRequestRange() == nil {
					return false
				}
			}
		}
		return true
	}
	return false
}
