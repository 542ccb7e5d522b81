package kafka

import (
	"maps"
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"
)

const apiVersionsKey = 18

// apiVersions tells which requests the server knows.
func (s *Server) apiVersions(_ *request, q *kmsg.ApiVersionsRequest) *kmsg.ApiVersionsResponse {
	p := q.ResponseKind().(*kmsg.ApiVersionsResponse)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		k := kmsg.NewApiVersionsResponseApiKey()
		k.ApiKey, k.MinVersion, k.MaxVersion = key, keys[key].min, keys[key].max
		p.ApiKeys = append(p.ApiKeys, k)
	}
	return p
}

// versionsTooNew answers an ApiVersions request of an unknown version: every client understands
// version 0, and asks again with a version from the list.
func versionsTooNew() kmsg.Response {
	p := (*Server)(nil).apiVersions(nil, kmsg.NewPtrApiVersionsRequest())
	p.ErrorCode = codeUnsupportedVersion
	p.SetVersion(0)
	return p
}
